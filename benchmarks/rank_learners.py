"""Learners over some of the ranks that torchrun started, and the time of a step on all of these.

On a machine without GPUs the ranks are those of gloo, for tries of a script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.record import MACHINE, finish, gpu, gpu_machine
from benchmarks.table import Row
from benchmarks.training import learner_in
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.learner import Learner
from spmd_rl.types.batch import Batch

T = TypeVar("T")
GPU_PACKAGES = ("triton", "flash-attn-4")


class Ranks:
    """The ranks of a torchrun world, and by name the splits of the learners that they may have."""

    def __init__(self, splits: Mapping[str, RoleSplit]) -> None:
        self.world = world = World.from_env()
        join(world, open_store(world))
        self._placements = {
            name: plan_split({"train": one}, world.size)["train"] for name, one in splits.items()
        }
        self._meshes = Meshes(world)
        self._meshes.build(list(self._placements.values()))
        host = dist.new_group(list(range(world.size)), backend="gloo")
        assert isinstance(host, dist.ProcessGroup)
        self._host = host

    def learner(self, split: str, spec: ModelSpec, cfg: TrainerConfig) -> Learner:
        """Return a learner with random weights. Ranks: all of the split."""
        return learner_in(self._meshes.context(self._placements[split]), spec, cfg)

    def alone(self, work: Callable[[], T]) -> T:
        """Return on every rank what `work` returns on the first one, for which the others wait."""
        found: list[Any] = [work() if self.world.rank == 0 else None]
        dist.broadcast_object_list(found, 0, self._host, torch.device("cpu"))
        answer: T = found[0]
        return answer

    def say(self, text: str) -> None:
        """Print a line on the first rank."""
        if self.world.rank == 0:
            print(text, flush=True)

    def finish(self, script: str, rows: list[Row], *, save: bool) -> int:
        """Leave the world, after the first rank has printed or saved the rows. Returns 1 there if a
        bar is missed, else 0.
        """
        missed = 0
        if self.world.rank == 0:
            missed = finish_anywhere(script, rows, save=save)
        self.alone(lambda: None)
        dist.destroy_process_group()
        return missed


def finish_anywhere(
    script: str, rows: list[Row], *, save: bool, packages: Sequence[str] = GPU_PACKAGES
) -> int:
    """Print the rows or save them, of a GPU or of a CPU. `packages` are there on GPUs alone."""
    if not torch.cuda.is_available():
        return finish(script, ("torch",), rows, save=save, machine=MACHINE)
    return finish(script, ("torch", *packages), rows, save=save, machine=gpu_machine(), **gpu())


def on_gpu() -> bool:
    return torch.cuda.is_available()


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_seconds(one: Learner, given: Batch) -> float:
    """Return the time of a step, of the rank that took longest. Ranks: all of the learner."""
    wait_for_gpu()
    one.context.all_reduce_max(0)
    start = time.perf_counter()
    one.train_step(given, grpo_loss)
    wait_for_gpu()
    return one.context.all_reduce_max(int(1e9 * (time.perf_counter() - start))) / 1e9


def peak_gib(one: Learner, given: Batch) -> float:
    """Return the most memory of a step, of the rank that took most; 0 on CPUs. Ranks: all of the
    learner.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    one.train_step(given, grpo_loss)
    most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return one.context.all_reduce_max(most) / 2**30
