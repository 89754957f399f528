"""GPU memory of a process and its NCCL communicators, measured step by step on two GPUs.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.communicators [--save]

The readings are compared with the constants of `spmd_rl/offload/gpu_overhead.py`. Communicators are
made as `mesh/` makes them: eagerly, bound to the GPU. NCCL connects them at their first collective.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.mesh.world import World, join, open_store

PACKAGES = ("torch",)
NUMBERS = 1 << 22


def used_mib() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


class Steps:
    """Memory that each step added, as rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.last = 0.0

    def take(self, what: str, do: Callable[[], object]) -> object:
        made = do()
        now = used_mib()
        self.rows.append(measured(what, now - self.last, "MiB"))
        self.last = now
        return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    world, steps = World.from_env(), Steps()
    torch.cuda.set_device(world.local_rank)
    everybody = list(range(world.size))
    one = torch.ones(NUMBERS, device="cuda")
    many, other = one.new_empty(NUMBERS * world.size), torch.empty_like(one)

    def peers(group: object) -> None:
        ring = [(world.rank + 1) % world.size, (world.rank - 1) % world.size]
        moves = [
            dist.P2POp(dist.isend, one, ring[0], group),
            dist.P2POp(dist.irecv, other, ring[1], group),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    steps.take("a context", lambda: None)
    steps.take(
        "a product by cuBLAS",
        lambda: one[:256].view(16, 16).bfloat16() @ one[:256].view(16, 16).bfloat16(),
    )
    steps.take("join: NCCL and the world's communicator", lambda: join(world, open_store(world)))
    alone = steps.take(
        "two communicators of one rank, one for each",
        lambda: [dist.new_group([r]) for r in everybody],
    )
    assert alone
    first = steps.take("a second communicator", lambda: dist.new_group(everybody))
    second = steps.take("a third one", lambda: dist.new_group(everybody))
    for name, group in (("second", first), ("third", second)):
        steps.take(
            f"{name}: its first all-gather",
            lambda group=group: dist.all_gather_into_tensor(many, one, group),
        )
        steps.take(
            f"{name}: reduce-scatter",
            lambda group=group: dist.reduce_scatter_tensor(one, many, group=group),
        )
        steps.take(f"{name}: all-reduce", lambda group=group: dist.all_reduce(one, group=group))
        steps.take(f"{name}: send and receive", lambda group=group: peers(group))
        steps.take(
            f"{name}: all-to-all",
            lambda group=group: dist.all_to_all_single(many.clone(), many, group=group),
        )
    code = (
        finish(__file__, PACKAGES, steps.rows, save=options.save, machine=gpu_machine(), **gpu())
        if world.rank == 0
        else 0
    )
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
