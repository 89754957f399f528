"""GRPO whose engine finds its GPU full while it wakes, once, for tests.

A file `struck` in the working directory says that it has happened. A file `full` there has the next
slab that wakes find no room. Slabs that sleep are overwritten here: a use of them would be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import spmd_rl as rl
from spmd_rl.controller.link import Link
from spmd_rl.errors import ResidencyError
from spmd_rl.offload.host import HostMemory
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


FULL_AT = 2  # the index of the step
POISON = 0x41  # four of these bytes are the number 12.08


def _unmap_and_poison(memory: HostMemory) -> None:
    memory.is_mapped = False
    memory.bytes.fill_(POISON)


def _taken(path: Path) -> bool:
    """Remove a file, and return whether it was there. Of two ranks, one finds it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _map_or_fail(memory: HostMemory) -> None:
    if _taken(Path("full")):
        raise ResidencyError("9 GiB are asked for, and the GPU has 8 GiB left")
    memory.is_mapped = True


HostMemory.unmap = _unmap_and_poison  # type: ignore[method-assign]
HostMemory.map = _map_or_fail  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    full: bool = False  # whether the GPU is full, at step 3
    misuse: Literal["", "export", "push", "generate"] = (
        ""  # what is called while the trainer sleeps
    )


class Filler(rl.Trainer):
    """A trainer that can have the next slab which wakes find no room."""

    @rl.collective
    def fill_gpu(self) -> None:
        """Do so once in all starts of the run."""
        if self.context.rank == 0 and not Path("struck").exists():
            Path("struck").touch()
            Path("full").touch()


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(Filler, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    start = ctl.resume(trainer=trainer, prompts=prompts, **update.savers)
    for step in ctl.steps(cfg.steps, start):
        with ctl.phase("sync"):
            weights.push(version=step.index)
        if cfg.full and step.index == FULL_AT:
            trainer.fill_gpu.call()
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
            misuse(cfg, trainer, weights)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
        if cfg.misuse == "generate":
            with ctl.phase("rollout"):
                rollout.generate.call(prompts.take(1), cfg.sampling)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))


def misuse(cfg: Config, trainer: rl.Trainer, weights: Link) -> None:
    """Call what needs the trainer's memory, in a phase in which it sleeps."""
    assert trainer.version.call() >= 0, "a number needs no memory"
    if cfg.misuse == "export":
        trainer.export_hf.call("hf")
    elif cfg.misuse == "push":
        weights.push(version=7)
