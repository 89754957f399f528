"""Cost of FSDP2's collectives in a training step on several GPUs, and how much of it is hidden.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.fsdp_overlap [4B] [--save]

The step is that of train_step.py, with its batch on each rank. Each layer is a unit. Weights and
optimizer are sharded over all ranks. `its own` is FSDP2's prefetch as the trainer uses it. With `a
layer ahead`, each layer requests the weights of the next before it runs. Times are medians over
steps in turns, on rank 0. The hidden share is the part of the time of NCCL's kernels during which
another kernel runs, in one profiled step of rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import DeviceType, ProfilerActivity

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.train_step import PACKAGES, STEP_TOKENS, step_seconds
from benchmarks.training import batch, config, learner, scored
from spmd_rl.mesh.world import World
from spmd_rl.train.config import fsdp2_settings
from spmd_rl.train.fsdp2.backend import Fsdp2

PREFETCH = {"its own": False, "a layer ahead": True}
REPEATS, WARMUPS = 5, 2
Span = tuple[float, float]


def ask_ahead(units: Sequence[FSDPModule], ahead: bool) -> None:
    """Make each layer prefetch the next. `units` are those of `Fsdp2` in order, root last."""
    for one, following in pairwise(units[:-1]):
        one.set_modules_to_forward_prefetch([following] if ahead else [])


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Return the time that both sets of spans cover."""
    ours, theirs, shared = union(first), union(second), 0.0
    while ours and theirs:
        shared += max(0.0, min(ours[0][1], theirs[0][1]) - max(ours[0][0], theirs[0][0]))
        (ours if ours[0][1] < theirs[0][1] else theirs).pop(0)
    return shared


def kernels(step: Callable[[], object]) -> tuple[list[Span], list[Span]]:
    """Return the spans of NCCL's kernels and of all others during `step`, in microseconds."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for one in found.events() or ():
        if one.device_type == DeviceType.CUDA and not one.name.startswith("Mem"):
            spans["nccl" in one.name.lower()].append((one.time_range.start, one.time_range.end))
    return spans[True], spans[False]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="4B")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    world = World.from_env()
    cfg = config(options.model)
    cfg = replace(cfg, backend=replace(fsdp2_settings(cfg), wrap="layer"))
    one = learner(options.model, cfg, world)
    assert isinstance(one.backend, Fsdp2)
    backend = one.backend
    given = scored(one, batch(STEP_TOKENS, backend.scorer.model.spec.vocab_size))
    times: dict[str, list[float]] = {name: [] for name in PREFETCH}
    for repeat in range(WARMUPS + REPEATS):
        for name, ahead in PREFETCH.items():
            ask_ahead(backend.units, ahead)
            seconds = step_seconds(one, given)
            if repeat >= WARMUPS:
                times[name].append(seconds)
    what = f"Qwen3-{options.model} on {world.size} GPUs"
    own, asked = (statistics.median(times[name]) for name in PREFETCH)
    rows = [compared(f"{what}: step", own, "s", peer="a layer ahead", peer_value=asked)]
    for name, ahead in PREFETCH.items():
        ask_ahead(backend.units, ahead)
        collective, others = kernels(lambda: step_seconds(one, given))
        spent = sum(end - start for start, end in union(collective))
        rows.append(measured(f"{what}, {name}: NCCL's kernels", spent / 1e3, "ms"))
        rows.append(
            measured(f"{what}, {name}: of them hidden", overlap(collective, others) / spent, "")
        )
    code = (
        finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())
        if world.rank == 0
        else 0
    )
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
