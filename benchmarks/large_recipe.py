"""The recipe `grpo` without checkpoints and export, with a reading of GPU memory in each phase, for
large_model.py.

    spmd-rl run benchmarks.large_recipe --model FOLDER --data FILE \\
        --reward benchmarks.proof_recipe:even
"""

from __future__ import annotations

import spmd_rl as rl
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]
USED, KV = "memory/{}_used_bytes", "memory/kv_bytes"


class Gauge(rl.Role):
    """Reads the memory of its rank's GPU."""

    @rl.collective
    def used_bytes(self) -> rl.Sharded[list[int]]:
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return [total - free]


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    gauge = ctl.spawn(Gauge, cfg, on=ctl.world.split({"gauge": rl.RoleSplit()}).gauge)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        used: dict[str, int] = {}
        with ctl.phase("sync"):
            weights.push(version=step.index)
            used["sync"] = max(gauge.used_bytes.call())
        with ctl.phase("rollout"):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
            used["rollout"] = max(gauge.used_bytes.call())
            kv_bytes = max(stats["kv_bytes"] for stats in rollout.stats.call())
        with ctl.phase("train"):
            stats = update.step(groups, step.index)
            # torch's allocator keeps what the step needed most
            used["train"] = max(gauge.used_bytes.call())
        readings = {USED.format(phase): float(count) for phase, count in used.items()}
        step.log(groups, stats | readings | {KV: float(kv_bytes)})
