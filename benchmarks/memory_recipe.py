"""The recipe `grpo` with a reading of GPU memory after every phase, for memory.py.

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
    """One GPU's bytes: all in use, those outside torch's allocator, and the allocator's peak.

    The peak is since the last reading.
    """

    used_bytes: int
    outside_bytes: int
    peak_bytes: int


class Gauge(rl.Role):
    """Reads the memory of its rank's GPU."""

    @rl.collective
    def read(self) -> rl.Sharded[list[Reading]]:
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        outside, peak = (
            total - free - torch.cuda.memory_reserved(),
            torch.cuda.max_memory_allocated(),
        )
        torch.cuda.reset_peak_memory_stats()
        return [Reading(total - free, outside, peak)]


def main(ctl: rl.Controller, cfg: Config) -> None:
    readings: list[tuple[str, list[dict[str, int]]]] = []
    gauge = ctl.spawn(Gauge, cfg, on=ctl.world.split({"gauge": rl.RoleSplit()}).gauge)

    def read(when: str) -> None:
        readings.append((when, [asdict(one) for one in gauge.read.call()]))

    read("joined")
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(
        rl.Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=cfg.reward,
        hooks=cfg.hooks,
        settings=rl.as_data(cfg),
        seed=cfg.run.seed,
    )
    read("spawned")
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        with ctl.phase("sync", awake=[trainer, rollout]):
            weights.push(version=step.index)
            read("sync")
        with ctl.phase("rollout", awake=[rollout]):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
            read("rollout")
        with ctl.phase("train", awake=[trainer]):
            stats = trainer.train_step.call(
                rl.pack(groups, rl.group_advantage(groups)), rl.grpo_loss
            )
            read("train")
        step.log(groups, stats)
    (ctl.run_folder / FILE).write_text(json.dumps(readings))
