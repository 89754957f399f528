"""Our side: a GRPO recipe under the real controller, one rank, the mismatch check on.

spmd-rl run benchmarks.grpo_step.ours --model FOLDER --data FILE
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import spmd_rl as rl
from benchmarks.grpo_step.work import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    GROUP,
    LEARNING_RATE,
    NEW_TOKENS,
    PROMPTS,
    given_completions,
    num_digits,
)
from benchmarks.peer import Laps
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

STEPS = 1 << 20  # the driver ends the run


@dataclass(frozen=True)
class Config:
    model: str
    data: str
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    engine: rl.NativeEngineConfig = field(
        default_factory=lambda: rl.NativeEngineConfig(max_batch=PROMPTS * GROUP)
    )
    trainer: rl.TrainerConfig = field(
        default_factory=lambda: rl.TrainerConfig(
            lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, clip_norm=CLIP_NORM
        )
    )


def reward(prompt: Prompt, sample: Sample) -> float:
    return num_digits(sample.text)


def main(ctl: rl.Controller, cfg: Config) -> None:
    laps = Laps()
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(
        rl.Rollout,
        cfg.engine,
        on=roles.infer,
        model=cfg.model,
        reward=f"{__name__}:reward",
        seed=cfg.run.seed,
    )
    weights = ctl.link(trainer, rollout)
    tokenizer = rl.load_tokenizer(cfg.model)
    prompts = rl.Prompts(cfg.data, rl.PromptConfig(shuffle=False), tokenizer)
    sampling = rl.SamplingConfig(num_samples=GROUP, max_tokens=NEW_TOKENS, ignore_eos=True)
    facts: dict[str, float] = {}
    for step in ctl.steps(STEPS):
        laps.lap(**facts)
        with ctl.phase("sync", awake=[trainer, rollout]):
            weights.push(version=step.index)
        with ctl.phase("rollout", awake=[rollout]):
            drawn = prompts.take(PROMPTS)
            groups = (
                rollout.generate.call(drawn, sampling) if step.index else _given(drawn, tokenizer)
            )
        with ctl.phase("train", awake=[trainer]):
            batch = rl.pack(groups, rl.group_advantage(groups))
            stats = trainer.train_step.call(batch, rl.grpo_loss)
        step.log(groups, stats)
        facts = _facts(groups, batch, stats)


def _given(prompts: list[Prompt], tokenizer: object) -> list[Group]:
    """The first step's groups: completions that no engine made."""
    return [
        Group(
            prompt,
            [_sample(prompt, index, tokens, tokenizer) for index, tokens in enumerate(group)],
        )
        for prompt, group in zip(prompts, given_completions(), strict=True)
    ]


def _sample(prompt: Prompt, index: int, tokens: list[int], tokenizer: object) -> Sample:
    text = tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[attr-defined]
    unknown = np.full(len(tokens), -1, np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    sample = Sample(
        prompt.uid, index, np.array(tokens, np.int32), logprobs, unknown, "truncated", text=text
    )
    learned = np.ones(len(tokens), np.bool_)
    return sample.replace(reward=num_digits(text), mask=learned)


def _facts(groups: list[Group], batch: rl.Batch, stats: dict[str, float]) -> dict[str, float]:
    return {
        "generated_tokens": sum(len(sample.tokens) for group in groups for sample in group.samples),
        "gradient_tokens": int(batch.mask.sum()),
        "prompt_tokens": sum(len(group.prompt.tokens) for group in groups),
        "loss": stats["train/loss"],
        "grad_norm": stats["train/grad_norm"],
        "entropy": stats["train/entropy"],
        # none in the first step, whose tokens no engine drew
        "mismatched_tokens": stats.get("onpolicy/mismatched_tokens", 0.0),
        "compared_tokens": stats.get("onpolicy/compared_tokens", 0.0),
    }
