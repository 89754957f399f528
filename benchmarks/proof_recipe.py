"""The recipe `grpo` without checkpoints and export, which at 4B would write 64 GB, and a reward.

    spmd-rl run benchmarks.proof_recipe --model FOLDER --data FILE \\
        --reward benchmarks.proof_recipe:even
"""

from __future__ import annotations

import spmd_rl as rl
from spmd_rl.config.dump import as_data
from spmd_rl.recipes.grpo import Config, check
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

__all__ = ["Config", "check", "even", "main"]


class Rollout(rl.Rollout):
    """The shipped role, which can also return a digest of its weights."""

    @rl.collective
    def weights_digest(self) -> rl.Sharded[list[str]]:
        return [f"{sum(self.engine.sink().digest().values()) % 2**64:016x}"]


def even(prompt: Prompt, sample: Sample) -> float:
    """Return the share of even token ids: a reward that a few steps can raise."""
    return float((sample.tokens % 2 == 0).mean())


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    update = rl.PolicyUpdate(ctl, cfg, trainer, roles)
    rollout = ctl.spawn(
        Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=cfg.reward,
        hooks=cfg.hooks,
        settings=as_data(cfg),
        seed=cfg.run.seed,
    )
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    held: set[str] = set()
    for step in ctl.steps(cfg.steps):
        with ctl.phase("sync", awake=[trainer, rollout]):
            weights.push(version=step.index)
            held |= set(rollout.weights_digest.call())
        with ctl.phase("rollout", awake=[rollout]):
            groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
            (counts,) = rollout.stats.call()
        with ctl.phase("train", awake=[trainer]):
            stats = update.step(groups, step.index)
        counts["num_weights"] = len(held)
        step.log(groups, stats | {f"engine/{name}": float(count) for name, count in counts.items()})
