"""Rows to the experts of other GPUs and back: torch, DeepEP and symmetric memory, on one host.

A trainer's pass has 16,384 tokens a rank of Qwen3-30B-A3B's shape, with random routes. Dispatch is
beside a plain copy of as many bytes from the memory of the same peers. The combine of DeepEP's own
sums what ranks have rounded, and is shown to say what exact sums cost. A decoding step has 64 rows
a rank, and its time is that of 48 layers in one graph, without their experts.

    torchrun --nproc-per-node 4 -m benchmarks.expert_dispatch [--save]

Every time is the median of some turns, of the rank that took longest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from benchmarks.gpu_ranks import run, seconds
from benchmarks.record import compared, counted, measured
from benchmarks.table import Row
from spmd_rl.kernels.moe.deep_ep_buffer import PACKAGE, DeepEpBuffer
from spmd_rl.kernels.moe.deep_ep_dispatcher import DeepEpDispatcher
from spmd_rl.kernels.moe.dispatcher import EpDispatcher
from spmd_rl.kernels.moe.expert_gather import ExpertGather, SlotRows, TorchGather
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.symm_gather import RowSizes, SymmGather
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.runtime.versions import installed

HIDDEN, EXPERTS, CHOSEN = 2048, 128, 8
ROW_BYTES = 2 * HIDDEN
TOKENS, ROWS, LAYERS = 16384, 64, 48
DISPATCH_BAR = 0.85


class Sent(NamedTuple):
    """What a pass of a dispatcher gave."""

    rows: Tensor
    out: Tensor


def drawn(num_rows: int, rank: int) -> tuple[Tensor, ExpertRoutes]:
    """Rows of a rank, and as many different experts of each, which are all alike."""
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(num_rows, HIDDEN, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(num_rows, EXPERTS, device="cuda", generator=generator)
    ids = scores.topk(CHOSEN).indices.sort().values
    return x, ExpertRoutes(ids, torch.rand(ids.shape, device="cuda", generator=generator))


class PeerCopy:
    """Plain copies from the memory of all peers, as many bytes as rows of a dispatch have.

    Peers' memory stays mapped while this lives. A kernel reads it, because copies by the driver
    were refused there.
    """

    def __init__(self, group: dist.ProcessGroup, num_rows: int) -> None:
        self._rows = -(-num_rows // (group.size() - 1))
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        handle: Any = symmetric.rendezvous(memory, group)
        self._mapped = memory, handle
        rank, size = group.rank(), group.size()
        peers = [(rank + one) % size for one in range(1, size)]  # no two ranks begin with one
        shape = [self._rows, HIDDEN]
        self._from = [handle.get_buffer(peer, shape, torch.bfloat16) for peer in peers]
        self._to = torch.empty(len(peers), *shape, dtype=torch.bfloat16, device="cuda")

    def __call__(self) -> None:
        for to, peer in zip(self._to, self._from, strict=True):
            torch.mul(peer, 1, out=to)


def train_rows(group: dist.ProcessGroup, rank: int) -> Iterator[Row]:
    x, routes = drawn(TOKENS, rank)
    what = f"{group.size()} GPUs, {TOKENS:,} tokens a GPU"
    kinds: dict[str, EpDispatcher] = {"torch": EpDispatcher(group, EXPERTS)}
    if installed(PACKAGE):
        kinds["deep_ep"] = DeepEpDispatcher(group, EXPERTS)
    first: Sent | None = None
    for name, dispatcher in kinds.items():
        sent = dispatcher.dispatch(x, routes)
        y = sent.rows * 2
        found = Sent(sent.rows, dispatcher.combine(y, sent))
        first = first or found
        are_equal = [torch.equal(*both) for both in zip(found, first, strict=True)]
        yield counted(f"{what}: {name}: rows and sums that are torch's", are_equal)
        dispatches = seconds(partial(dispatcher.dispatch, x, routes))
        yield measured(f"{what}: {name}: dispatch, with its host", 1e6 * dispatches, "us")
        combines = seconds(partial(dispatcher.combine, y, sent))
        yield measured(f"{what}: {name}: exact combine", 1e6 * combines, "us")
    if installed(PACKAGE):
        yield from deep_ep_rows(what, group, x, routes)


def deep_ep_rows(
    what: str, group: dist.ProcessGroup, x: Tensor, routes: ExpertRoutes
) -> Iterator[Row]:
    """Yield the rates of DeepEP's kernels alone."""
    buffer = DeepEpBuffer(group, ROW_BYTES)
    wants = buffer.layout(routes.ids, EXPERTS)
    coming = wants.per_rank.clone()
    dist.all_to_all_single(coming, wants.per_rank, group=group)
    sent = buffer.send(x, routes.ids, wants, int(coming.sum()))
    remote = int(coming.sum() - coming[group.rank()])
    most = torch.tensor(remote, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    num_bytes = int(most) * ROW_BYTES
    copies = seconds(PeerCopy(group, int(most)))
    dispatches = seconds(partial(buffer.send_again, x, sent.way))
    yield compared(
        f"{what}: deep_ep: rows that cross, beside a plain copy",
        num_bytes / dispatches / 1e9,
        "GB/s",
        peer="copies from all peers",
        peer_value=num_bytes / copies / 1e9,
        at_least=DISPATCH_BAR,
    )
    native = seconds(partial(buffer.buffer.combine, sent.rows.contiguous(), sent.way.handle))
    yield measured(f"{what}: deep_ep: its own combine, inexact", 1e6 * native, "us")


class NoExperts:
    """What experts would give: the same for each pass."""

    def __init__(self, num_rows: int) -> None:
        places = torch.arange(num_rows * CHOSEN, device="cuda", dtype=torch.int32)
        self._rows = places.view(num_rows, CHOSEN)
        self._y = torch.randn(num_rows * CHOSEN, HIDDEN, device="cuda").bfloat16()

    def __call__(self, x: Tensor, routes: ExpertRoutes) -> SlotRows:
        is_own = routes.ids < EXPERTS // dist.get_world_size()
        return SlotRows(self._y, torch.where(is_own, self._rows, -1))


def all_layers(gather: ExpertGather, x: Tensor, routes: ExpertRoutes, experts: NoExperts) -> Tensor:
    for _ in range(LAYERS):
        x = gather.run(x, routes, experts)
    return x


def decode_rows(group: dist.ProcessGroup, rank: int) -> Iterator[Row]:
    x, routes = drawn(ROWS, rank)
    experts = NoExperts(group.size() * ROWS)
    what = f"{group.size()} GPUs, {ROWS} rows a GPU, {LAYERS} layers without experts"
    reference = TorchGather(group, EXPERTS)
    sizes = RowSizes(HIDDEN, CHOSEN, torch.bfloat16)
    symm = SymmGather(group, EXPERTS, ROWS, sizes)
    passes = {
        "torch": partial(all_layers, reference, x, routes, experts),
        "symm": partial(all_layers, symm, x, routes, experts),
    }
    graph, out = record(passes["symm"], torch.cuda.graph_pool_handle())
    graph.replay()
    yield counted(f"{what}: symm: sums that are torch's", [torch.equal(out, passes["torch"]())])
    for name, work in (*passes.items(), ("symm in a graph", graph.replay)):
        yield measured(f"{what}: {name}", 1e6 * seconds(work) / LAYERS, "us a layer")


def rows_of(group: dist.ProcessGroup) -> Iterator[Row]:
    yield from train_rows(group, group.rank())
    yield from decode_rows(group, group.rank())


if __name__ == "__main__":
    sys.exit(run(__file__, __doc__, rows_of, deep_ep=installed(PACKAGE) or "none"))
