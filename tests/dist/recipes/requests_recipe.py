"""Recipe of a test: the samples of a few prompts, asked for in a random way; what came is written
to `drawn.json`.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

import spmd_rl as rl
from spmd_rl.config.dump import as_data
from spmd_rl.recipes import grpo
from spmd_rl.recipes.grpo import check

__all__ = ["Config", "check", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    order: int = 0  # seeds the way in which samples are asked for; 0: all by one call


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    rollout = ctl.spawn(
        rl.Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=cfg.reward,
        hooks=cfg.hooks,
        settings=as_data(cfg),
        seed=cfg.run.seed,
    )
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    ctl.link(trainer, rollout).push(version=0)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    asked = prompts.take(cfg.prompts_per_step)
    if not cfg.order:
        groups = rollout.generate.call(asked, cfg.sampling)
    else:
        groups = ask_at_random(rollout, asked, cfg.sampling, random.Random(cfg.order))
    drawn = {
        f"{group.prompt.uid}.{sample.index}": [
            sample.tokens.tolist(),
            sample.logprobs.view("uint32").tolist(),
            sample.reward,
        ]
        for group in groups
        for sample in group.samples
    }
    (ctl.run_folder / "drawn.json").write_text(json.dumps(dict(sorted(drawn.items()))))


def ask_at_random(
    rollout: Any, asked: list[rl.Prompt], sampling: rl.SamplingConfig, rng: random.Random
) -> list[rl.Group]:
    """Ask for some prompts by `generate`, and for others one by one, some of which are aborted at
    a random moment and go on later.
    """
    asked = rng.sample(asked, len(asked))
    together, single = asked[: len(asked) // 3], asked[len(asked) // 3 :]
    whole = rollout.generate.start(together, sampling) if together else None
    calls = {prompt.uid: rollout.complete.start(prompt, sampling) for prompt in single}
    last = single[-1].uid
    calls[last].abort()  # it is behind all others, so it has hardly begun
    by_uid = {prompt.uid: prompt for prompt in asked}
    struck = rng.sample(sorted(calls.keys() - {last}), len(calls) // 2)
    ended = rl.CompletionQueue[rl.Group]()
    for call in calls.values():
        ended.add(call)
    strike_one_that_runs(rollout, calls, struck)
    groups, num_resumed = [], 0
    while (call := ended.wait()) is not None:
        group = call.wait()
        # an abort may also come between the last token and the grade
        unfinished = [
            sample
            for sample in group.samples
            if sample.status == "aborted" or math.isnan(sample.reward)
        ]
        if unfinished or len(group.samples) < sampling.num_samples:
            num_resumed += 1
            prompt = by_uid[group.prompt.uid]
            ended.add(rollout.complete.start(prompt, sampling, partial=group.samples))
        else:
            groups.append(group)
        if struck:
            calls[struck.pop()].abort()
    print(f"{num_resumed} answers were resumed", flush=True)
    return groups + (whole.wait() if whole else [])


def strike_one_that_runs(rollout: Any, calls: dict[int, Any], struck: list[int]) -> None:
    """Abort one of `struck` while the engine draws it; take those that end too early out."""
    while struck:
        if any(has_begun(group, struck[-1]) for group in rollout.partials.call()):
            calls[struck.pop()].abort()
            return
        if calls[struck[-1]].done:
            struck.pop()


def has_begun(group: rl.Group, uid: int) -> bool:
    return group.prompt.uid == uid and any(len(sample.tokens) for sample in group.samples)
