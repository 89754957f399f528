"""The recipe `grpo` with a reading of GPU memory in every phase, for memory.py.

    spmd-rl run benchmarks.memory_recipe --model FOLDER --data FILE \\
        --reward benchmarks.proof_recipe:even
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import spmd_rl as rl
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]
FILE = "memory.json"


@dataclass(frozen=True)
class Reading:
    """One GPU's bytes: those outside torch's allocator, and the allocator's peak.

    The peak is since the last reading.
    """

    outside_bytes: int
    peak_bytes: int


class Gauge(rl.Role):
    """Reads the memory of its rank's GPU. It is spawned first, to follow the other roles."""

    def __init__(self, cfg: Config, context: rl.RoleContext) -> None:
        super().__init__(cfg, context)
        from benchmarks.peak_meter import PeakMeter

        self.meter = PeakMeter()

    @rl.collective
    def read(self) -> rl.Sharded[list[Reading]]:
        return [Reading(*self.meter.read())]


def main(ctl: rl.Controller, cfg: Config) -> None:
    readings: list[tuple[str, list[dict[str, int]]]] = []
    gauge = ctl.spawn(Gauge, cfg, on=ctl.world.split({"gauge": rl.RoleSplit()}).gauge)

    def read(when: str) -> None:
        readings.append((when, [asdict(one) for one in gauge.read.call()]))

    read("joined")
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    read("spawned")
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        with ctl.phase("sync"):
            gauge.read.call()  # the peak before this phase's sleep and wake is not its own
            weights.push(version=step.index)
            read("sync")
        with ctl.phase("rollout"):
            gauge.read.call()
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
            read("rollout")
        with ctl.phase("train"):
            gauge.read.call()
            stats = trainer.train_step.call(
                rl.pack(groups, rl.group_advantage(groups)), rl.grpo_loss
            )
            read("train")
        step.log(groups, stats)
    (ctl.run_folder / FILE).write_text(json.dumps(readings))
