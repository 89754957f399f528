"""Rejection sampling: samples of an engine are graded, and good ones become supervised data.

spmd-rl run rejection_sampling --model PATH --data train.jsonl --reward module:function
spmd-rl run sft --model PATH --data runs/rejection_sampling/sft.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import spmd_rl as rl
from spmd_rl.algo.policy.rejection import accepted_samples
from spmd_rl.data.sft_file import SftFile
from spmd_rl.recipes import configs


@dataclass(frozen=True)
class Config(configs.DataRecipe):
    model: str  # Hugging Face folder with weights
    epochs: int = 1  # how often samples are drawn for each prompt
    prompts_per_step: int = 128  # each with sampling.num_samples samples
    # which samples become data; best: the best correct one of each prompt's step
    keep: Literal["best", "correct"] = "correct"
    threshold: float = 1.0  # least reward of a correct sample
    # the weights stay as they are, so one evaluation tells all: that before the first step
    eval: rl.EvalConfig = field(default_factory=lambda: rl.EvalConfig(at_end=False))
    split: configs.InferSplit = field(default_factory=configs.InferSplit)

    def __post_init__(self) -> None:
        rl.at_least(self, {"epochs": 1, "prompts_per_step": 1})


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_data_recipe(cfg)
    rl.check_evaluation(cfg)
    rl.check_engine(cfg.engine, cfg.run)


def main(ctl: rl.Controller, cfg: Config) -> None:
    engines = ctl.world.split(cfg.split).infer
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=engines, **rl.rollout_settings(cfg))
    prompts = rl.load_prompts(cfg)
    file = SftFile(ctl.run_folder / "sft.jsonl")
    num_prompts = cfg.epochs * len(prompts)
    num_steps = -(-num_prompts // cfg.prompts_per_step)

    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps)

    for step in ctl.steps(num_steps, ctl.resume(prompts=prompts, file=file)):
        evaluation.after(step.index)
        num_left = num_prompts - step.index * cfg.prompts_per_step
        drawn = prompts.take(min(cfg.prompts_per_step, num_left))
        with ctl.phase("rollout"):
            groups = rollout.generate.call(drawn, cfg.sampling)
        accepted = [
            accepted_samples(group, keep=cfg.keep, threshold=cfg.threshold) for group in groups
        ]
        file.add(
            [
                record_of(group.prompt, sample)
                for group, samples in zip(groups, accepted, strict=True)
                for sample in samples
            ]
        )
        step.log(groups, file.metrics())
        step.log({"rejection/solved": sum(map(bool, accepted)) / len(groups)})
    print(f"{file.path} holds {file.num_records} answers to {num_prompts} prompts", flush=True)


def record_of(prompt: rl.Prompt, sample: rl.Sample) -> dict[str, Any]:
    """Return an answer as supervised data, with the messages and tools of a chat prompt."""
    fields = dict(prompt.chat)
    return {
        "prompt": fields.pop("messages", prompt.text),
        **fields,
        "answer": sample.text,
        "reward": sample.reward,
        "meta": prompt.meta,
    }
