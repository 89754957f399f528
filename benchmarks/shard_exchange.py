"""Sums of ranks that share a model, at decoding sizes: symmetric memory, torch and NCCL's own sum.

Rows are those of Qwen3-8B and Qwen3-32B. A call adds the fp32 parts of all ranks and rounds them to
bfloat16. `symm` has one order of additions, and so has `torch`. NCCL's all-reduce of bfloat16, the
peer, promises none. Times are those of 64 calls in one graph, but for torch's, whose host waits.

    torchrun --nproc-per-node 4 -m benchmarks.shard_exchange [--save]

Every time is the median of some turns, of the rank that took longest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.expert_dispatch import seconds
from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.kernels.linear.shard_exchange import ShardExchange, TorchExchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.mesh.world import World, join, open_store

HIDDEN_SIZES = (4096, 5120)
ROWS = (1, 4, 16, 64, 256, 2048)
CALLS = 64


def many(call: Callable[[], Tensor]) -> Tensor:
    for _ in range(CALLS):
        out = call()
    return out


def own_sum(exchange: ShardExchange, part: Tensor) -> Tensor:
    return exchange.sum(part, None, torch.bfloat16)


def nccl_sum(group: dist.ProcessGroup, zeros: Tensor) -> Tensor:
    dist.all_reduce(zeros, group=group)
    return zeros


def rows_of(group: dist.ProcessGroup, symm: ShardExchange, shape: tuple[int, int]) -> Iterator[Row]:
    what = f"{group.size()} GPUs, {shape[0]} rows of {shape[1]}"
    generator = torch.Generator("cuda").manual_seed(group.rank())
    part = torch.randn(shape, device="cuda", generator=generator)
    reference, memory = TorchExchange(group), torch.cuda.graph_pool_handle()
    zeros = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    ways = {"symm": partial(own_sum, symm, part), "nccl": partial(nccl_sum, group, zeros)}
    found, took = {}, {}
    for name, call in ways.items():
        graph, found[name] = record(partial(many, call), memory)
        took[name] = 1e6 * seconds(graph.replay) / CALLS
    wanted = own_sum(reference, part)
    yield counted(f"{what}: sums that are torch's", [torch.equal(found["symm"], wanted)])
    yield compared(
        f"{what}: symm", took["symm"], "us", peer="nccl, bfloat16", peer_value=took["nccl"]
    )
    eager = 1e6 * seconds(partial(own_sum, reference, part))
    yield measured(f"{what}: torch, with its host", eager, "us")


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    world = World.from_env()
    join(world, open_store(world))
    group = dist.new_group(list(range(world.size)))
    assert isinstance(group, dist.ProcessGroup)
    symm = SymmExchange(group)
    rows = [
        row
        for hidden in HIDDEN_SIZES
        for num_rows in ROWS
        for row in rows_of(group, symm, (num_rows, hidden))
    ]
    dist.barrier()
    missed = 0
    if world.rank == 0:
        missed = finish(
            __file__, ("torch",), rows, save=options.save, machine=gpu_machine(), **gpu()
        )
    dist.destroy_process_group()
    return missed


if __name__ == "__main__":
    sys.exit(main())
