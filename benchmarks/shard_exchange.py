"""Sums of ranks that share a model, at decoding sizes: symmetric memory, torch and NCCL's own sum.

Rows are those of Qwen3-8B and Qwen3-32B. A call adds the fp32 parts of all ranks and rounds them to
bfloat16. `symm` has one order of additions, and so has `torch`. NCCL's all-reduce of bfloat16, the
peer, promises none. The norm behind the sum is part of the same kernel, or, as a peer, a kernel of
its own. Times are those of 64 calls in one graph, but for torch's, whose host waits.

    torchrun --nproc-per-node 4 -m benchmarks.shard_exchange [--save]

Every time is the median of some turns, of the rank that took longest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_ranks import run, seconds
from benchmarks.record import compared, counted, measured
from benchmarks.table import Row
from spmd_rl.kernels import add_rms_norm
from spmd_rl.kernels.linear.shard_exchange import ShardExchange, TorchExchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.kernels.runtime.cuda_graph import record

HIDDEN_SIZES = (4096, 5120)
ROWS = (1, 4, 16, 64, 256, 2048)
CALLS = 64
EPS = 1e-6


def many(call: Callable[[], Tensor]) -> Tensor:
    for _ in range(CALLS):
        out = call()
    return out


def own_sum(exchange: ShardExchange, part: Tensor) -> Tensor:
    return exchange.sum(part, None, torch.bfloat16)


def normed(later: Callable[..., Tensor], part: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    """What a layer does behind a product, of a sum that `later` gives. Shape: part, [T, N], [N]."""
    return add_rms_norm(later(part, None, torch.bfloat16), *norm, EPS)[0]


def nccl_sum(group: dist.ProcessGroup, zeros: Tensor) -> Tensor:
    dist.all_reduce(zeros, group=group)
    return zeros


def rows_of(group: dist.ProcessGroup, symm: ShardExchange, shape: tuple[int, int]) -> Iterator[Row]:
    what = f"{group.size()} GPUs, {shape[0]} rows of {shape[1]}"
    generator = torch.Generator("cuda").manual_seed(group.rank())
    part = torch.randn(shape, device="cuda", generator=generator)
    reference, memory = TorchExchange(group), torch.cuda.graph_pool_handle()
    zeros = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    norm = torch.ones_like(zeros), torch.ones_like(zeros[0])
    ways = {
        "symm": partial(own_sum, symm, part),
        "nccl": partial(nccl_sum, group, zeros),
        "norm": partial(normed, symm.sum_later, part, norm),
        "apart": partial(normed, symm.sum, part, norm),
    }
    found, took = {}, {}
    for name, call in ways.items():
        graph, found[name] = record(partial(many, call), memory)
        took[name] = 1e6 * seconds(graph.replay) / CALLS
    wanted = own_sum(reference, part)
    yield counted(f"{what}: sums that are torch's", [torch.equal(found["symm"], wanted)])
    yield compared(
        f"{what}: symm", took["symm"], "us", peer="nccl, bfloat16", peer_value=took["nccl"]
    )
    yield counted(f"{what}: norms of one kernel", [torch.equal(found["norm"], found["apart"])])
    yield compared(
        f"{what}: sum and norm", took["norm"], "us", peer="two kernels", peer_value=took["apart"]
    )
    eager = 1e6 * seconds(partial(own_sum, reference, part))
    yield measured(f"{what}: torch, with its host", eager, "us")


def all_rows(group: dist.ProcessGroup) -> Iterator[Row]:
    symm = SymmExchange(group)
    for hidden in HIDDEN_SIZES:
        for num_rows in ROWS:
            yield from rows_of(group, symm, (num_rows, hidden))


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, all_rows))
