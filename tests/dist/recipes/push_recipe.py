"""Recipe of a test: weights are pushed while requests run, and each token is compared with the
trainer's log-prob under the version that drew it.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

import spmd_rl as rl
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(
        rl.Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=cfg.reward,
        seed=cfg.run.seed,
    )
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    weights.push(version=0)
    groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
    advantages = [np.linspace(-1, 1, len(group.samples)) for group in groups]
    trainer.train_step.call(rl.pack(groups, advantages), rl.grpo_loss)
    # Answers of one length end in the same step, and a push just then would reach none of them.
    first, *others = prompts.take(cfg.prompts_per_step)
    longer = replace(cfg.sampling, max_tokens=4 * cfg.sampling.max_tokens)
    calls = [rollout.complete.start(first, longer)]
    calls += [rollout.complete.start(prompt, cfg.sampling) for prompt in others]
    while not any(len(one.tokens) for group in rollout.partials.call() for one in group.samples):
        pass  # until one of them has a token of version 0
    weights.push(version=1, drain=False)
    mixed = [call.wait() for call in calls]
    samples = [sample for group in mixed for sample in group.samples]
    batch = rl.pack(mixed, rl.group_advantage(mixed))
    scores = trainer.score.call(batch)
    mask, versions = batch.mask, batch.versions
    drawn = np.asarray(batch.rollout_logprobs)
    differs = drawn.view(np.uint32) != scores.values.view(np.uint32)
    found = {
        "mixed_samples": sum(len(set(sample.versions.tolist())) > 1 for sample in samples),
        "decreasing_versions": sum(bool((np.diff(one.versions) < 0).any()) for one in samples),
        "compared_tokens": int((mask & (versions == 1)).sum()),
        "unequal_tokens": int((differs & mask & (versions == 1)).sum()),
        "unequal_under_the_other_version": int((differs & mask & (versions == 0)).sum()),
    }
    (ctl.run_folder / "drawn.json").write_text(json.dumps(found))
