"""GPU memory of a process and its NCCL communicators, step by step, and after a push of weights.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.communicators [--save]

The readings are compared with what `spmd_rl/offload/gpu_overhead.py` counts. Communicators are made
as `mesh/` makes them: eagerly, bound to the GPU. NCCL connects them when they are first used. The
push is that of a trainer which is sharded over all ranks, to an engine on each of them.

Ranks that share GPUs stand for several hosts, as NCCL takes them (docs/plan.md). Eight hosts of two
GPUs, whose ranks talk over sockets:

    SPMD_RL_RANKS_PER_GPU=8 torchrun --standalone --nproc-per-node=16 -m benchmarks.communicators

A reading is that of the first rank's GPU, divided by the ranks that share it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.offload.gpu_overhead import Peers, gpu_overhead
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout, Piece, chunk_box
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.verification import Verifier
from spmd_rl.weights.tensor_ends import TensorSink, TensorSource, do_nothing

PACKAGES = ("torch",)
NUMBERS = 1 << 22
MIB = 1 << 20
SHAPE, NUM_TENSORS = (4096, 4096), 8  # of the weights that are pushed


class Steps:
    """Memory that each step added to a GPU, for one of the ranks that share it, as rows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_gpus = min(torch.cuda.device_count(), world.local_size)
        self.num_sharing = -(-world.local_size // self.num_gpus)
        num_hosts = -(-world.size // self.num_gpus)
        self._where = f"{world.size} ranks, {num_hosts} host{'s' if num_hosts > 1 else ''}"
        self.used_mib = 0.0
        self.rows: list[Row] = []

    def take(self, what: str, do: Callable[[], object]) -> None:
        """Take a step on all ranks."""
        do()
        used = self._used_mib()
        self.rows.append(measured(f"{self._where}: {what}", used - self.used_mib, "MiB"))
        self.used_mib = used

    def compare(self, what: str, value: float, counted_bytes: int) -> None:
        """Add a row beside what the plan counts."""
        name, peer = f"{self._where}: {what}", counted_bytes / MIB
        self.rows.append(
            compared(name, value, "MiB", peer="as counted", peer_value=peer, at_most=1.0)
        )

    def _used_mib(self) -> float:
        """Return what this rank's part of its GPU holds, but for torch's own tensors."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.zeros(self._world.size, dtype=torch.int64)
        reserved[self._world.rank] = torch.cuda.memory_reserved()
        if dist.is_initialized():
            dist.all_reduce(reserved)  # on the host, once every rank has taken the step
        sharing = reserved[self._world.rank % self.num_gpus :: self.num_gpus]
        free, total = torch.cuda.mem_get_info()
        used = (total - free - int(sharing.sum())) / MIB / self.num_sharing
        if dist.is_initialized():
            dist.all_reduce(reserved)  # once every rank has read
        return used


def product() -> None:
    square = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    assert (square @ square).sum().item() == 16**3


def exchange(group: dist.ProcessGroup, distances: range) -> None:
    """Send to the ranks that follow at these distances, and receive from those before."""
    rank, size = group.rank(), group.size()
    sent = torch.ones(NUMBERS // 64, device="cuda")
    moves = []
    for distance in distances:
        moves.append(dist.P2POp(dist.isend, sent, (rank + distance) % size, group))
        found = torch.empty_like(sent)
        moves.append(dist.P2POp(dist.irecv, found, (rank - distance) % size, group))
    for work in dist.batch_isend_irecv(moves):
        work.wait()


def push(rank: int, num_ranks: int, group: dist.ProcessGroup | None) -> None:
    """Push weights that are sharded over some ranks to each of them, and compare what arrived."""
    device = torch.device("cuda", torch.cuda.current_device())
    names = [f"layers.{index}.weight" for index in range(NUM_TENSORS)]
    boxes = [chunk_box(SHAPE, part, num_ranks) for part in range(num_ranks)]
    whole = Box((0,) * len(SHAPE), SHAPE)
    sources, sinks = (
        [
            Layout(part, tuple(Piece(name, SHAPE, dtype, box) for name in names))
            for part, box in enumerate(of_ranks)
        ]
        for dtype, of_ranks in (("float32", boxes), ("bfloat16", [whole] * num_ranks))
    )
    own = boxes[rank]
    shards = {
        name: LocalTensor(SHAPE, own, torch.ones(own.extent, device=device)) for name in names
    }
    wanted = {name: torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for name in names}
    sink = TensorSink(LocalTensors.whole(wanted).items(), do_nothing, lambda version: None)
    ends = LocalEnds(rank, TensorSource(shards.items()), sink, device)
    plan = plan_moves(sources, sinks, None, rank)
    Executor(plan.moves, ends, plan.bucket_bytes).run(group)
    assert Verifier(plan.moves, plan.replicas, ends).compare(group).num_equal == NUM_TENSORS


def measure(world: World) -> list[Row]:
    """Take all steps, and return what each added."""
    steps, ranks = Steps(world), tuple(range(world.size))
    torch.cuda.set_device(world.own_device)
    if steps.num_sharing == 1:  # ranks that share a GPU cannot wait for each other yet
        steps.take("a context", lambda: torch.ones(1, device="cuda"))
        steps.take("a product by cuBLAS", product)
    join(world, open_store(world))
    steps.take("NCCL and the world's communicator", product)
    groups: list[dist.ProcessGroup] = []

    def new_group() -> None:
        made = dist.new_group(list(ranks))
        assert isinstance(made, dist.ProcessGroup)
        groups.append(made)

    for name in ("a second communicator", "a third one", "one for pushes"):
        steps.take(name, new_group)
    one = torch.ones(NUMBERS, device="cuda")
    many = one.new_empty(NUMBERS * world.size)
    for name, group in zip(("second", "third"), groups, strict=False):
        works: dict[str, Callable[[], object]] = {
            "its first all-gather": partial(dist.all_gather_into_tensor, many, one, group),
            "reduce-scatter": partial(dist.reduce_scatter_tensor, one, many, group=group),
            "all-reduce": partial(dist.all_reduce, one, group=group),
            "send to a rank, and receive": partial(exchange, group, range(1, 2)),
            "send to all, and receive": partial(exchange, group, range(1, world.size)),
            "all-to-all": partial(dist.all_to_all_single, many.clone(), many, group=group),
        }
        for what, do in works.items():
            steps.take(f"{name}: {what}", do)
    steps.take("a push within each rank", partial(push, 0, 1, None))
    before, peers = steps.used_mib, Peers(ranks, world.size - 1)
    steps.take("a push and its comparison", partial(push, world.rank, world.size, groups[2]))
    steps.take("the same once more", partial(push, world.rank, world.size, groups[2]))
    pushed = peers.num_bytes(steps.num_gpus)
    steps.compare("connections of a push", steps.used_mib - before, pushed)
    counted = gpu_overhead(4, 2, [peers] * 3, steps.num_gpus)
    steps.compare("all steps", steps.used_mib, sum(entry.num_bytes for entry in counted))
    for name, member in (("last", world.size - 1), ("first", 0)):
        steps.take(f"a communicator of the {name} rank alone", partial(dist.new_group, [member]))
    return steps.rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the rows to results/")
    options = parser.parse_args()
    world = World.from_env()
    rows, code = measure(world), 0
    if world.rank == 0:
        versions = gpu() | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        machine = gpu_machine()
        code = finish(__file__, PACKAGES, rows, save=options.save, machine=machine, **versions)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
