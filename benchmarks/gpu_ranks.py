"""What benchmarks over the GPUs of a host have in common: ranks join, take times together, and the
first one writes the rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import finish, gpu, gpu_machine
from benchmarks.table import Row
from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.parts.part import ModelPart

TURNS, REPEATS = 5, 10


def joined_group() -> tuple[World, dist.ProcessGroup]:
    """Join the ranks of this torchrun world, and return a group of them all."""
    world = World.from_env()
    join(world, open_store(world))
    group = dist.new_group(list(range(world.size)))
    assert isinstance(group, dist.ProcessGroup)
    return world, group


def part_of_world() -> ModelPart:
    """Join the ranks of this torchrun world, and return this one's part of a model of all."""
    world, group = joined_group()
    exchange = SymmExchange if torch.cuda.is_available() else TorchExchange
    return ModelPart(world.rank, world.size, exchange(group))


def seconds(work: Callable[[], Any]) -> float:
    """Return the median time of one call of `work`, of the rank that took longest."""
    work()
    found = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(TURNS):
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(REPEATS):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000 / REPEATS)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


@torch.no_grad()
def run(
    script: str,
    text: str | None,
    rows_of: Callable[[dist.ProcessGroup], Iterable[Row]],
    **versions: str,
) -> int:
    """Measure on all ranks of a torchrun world, and print or save the rows of the first one.

    `text` is shown by --help, and `versions` are those that `record.finish` takes.
    Returns 1 on the first rank if a bar is missed, else 0.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    world, group = joined_group()
    rows = list(rows_of(group))
    dist.barrier()
    missed = 0
    if world.rank == 0:
        found = gpu() | versions
        missed = finish(script, ("torch",), rows, save=options.save, machine=gpu_machine(), **found)
    dist.destroy_process_group()
    return missed
