"""GRPO in which one rank kills itself in the middle of a phase, once.

    spmd-rl run tests.system.mortal_recipe --model FOLDER --data FILE --reward NAME \\
        --dies_in=train --victim=1

A file `struck` in the run's folder says that it has happened, and when.
"""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import spmd_rl as rl
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]

STRUCK = "struck"
AT_STEP = 2  # the index of the step; a checkpoint of the step before is there
# the functions of a rank after whose first call it dies, by the phase that they are in
PLACES = {
    # the weights for another rank are packed, and not sent
    "sync": ("spmd_rl.weights.packing", "PackedBucket.pack"),
    # the first tokens of the answers are being drawn
    "rollout": ("spmd_rl.rollout.native.engine", "NativeEngine.step"),
    # between the forward pass and the backward pass
    "train": ("spmd_rl.train.learner", "Learner._loss_input"),
    # memory of the trainer is given back, and that of others is not yet taken
    "sleep": ("spmd_rl.offload.region", "TorchRegion.unmap"),
    # memory of the trainer is taken, and its bytes are still on the host
    "wake": ("spmd_rl.offload.region", "TorchRegion.map"),
    # this rank's part of the checkpoint is written, and the index of all parts is not
    "save": ("spmd_rl.train.checkpoint.checkpoint", "write_shards"),
}
# the same in a trainer whose ranks share experts
PLACES_OF_EXPERTS = {
    # it is known how many rows go where, and none has gone
    "dispatch": ("spmd_rl.kernels.moe.dispatcher", "EpDispatcher._exchanged_counts"),
    # rows have come to their experts, and what these give does not go back
    "combine": ("spmd_rl.kernels.moe.dispatcher", "EpDispatcher.dispatch"),
}
Phase = Literal["", "sync", "rollout", "train", "sleep", "wake", "save", "dispatch", "combine"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    dies_in: Phase = ""
    victim: int = 0  # the rank that dies


class Mortal(rl.Trainer):
    """A trainer of whose ranks one can be told to die."""

    @rl.collective
    def arm(self, phase: str, victim: int, struck: str) -> None:
        """Have the rank `victim` write the file `struck` and die, once it is in `phase`."""
        if self.context.world.rank == victim:
            die_after(*(PLACES | PLACES_OF_EXPERTS)[phase], Path(struck))


def die_after(module: str, name: str, struck: Path) -> None:
    """Replace a function by one that ends this process after its first call."""
    owner: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    real = getattr(owner, function)

    def last_call(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, function, last_call)


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(Mortal, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.load_prompts(cfg)
    start = ctl.resume(trainer=trainer, prompts=prompts, **update.savers)
    struck = ctl.run_folder / STRUCK
    for step in ctl.steps(cfg.steps, start):
        if cfg.dies_in and step.index == AT_STEP and not struck.exists():
            trainer.arm.call(cfg.dies_in, cfg.victim, str(struck))
        with ctl.phase("sync"):
            weights.push(version=step.index)
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
