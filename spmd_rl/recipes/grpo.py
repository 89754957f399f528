"""GRPO, synchronous and on-policy: gradients are taken at the very weights that drew the samples.

spmd-rl run grpo --model PATH --data train.jsonl --reward module:function
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import spmd_rl as rl


@dataclass(frozen=True)
class Config:
    model: str  # Hugging Face folder
    data: str  # .jsonl or .parquet of prompts and answers; a slice as path@[a:b]
    reward: str = "spmd_rl.rewards.match:exact"  # module:function or path/to/file.py:function
    steps: int = 200  # training steps of the whole run
    prompts_per_step: int = 32  # each with sampling.num_samples samples
    clip_low: float = 0.2  # the ratio of new to old probability is clipped below 1 - clip_low
    clip_high: float = 0.2  # and above 1 + clip_high
    # truncated importance sampling: the largest weight trainer / engine of a token; 0: none
    tis_cap: float = 0.0
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    prompts: rl.PromptConfig = field(default_factory=rl.PromptConfig)
    sampling: rl.SamplingConfig = field(default_factory=lambda: rl.SamplingConfig(num_samples=8))
    engine: rl.NativeEngineConfig | rl.SglangEngineConfig = field(
        default_factory=rl.NativeEngineConfig
    )
    trainer: rl.TrainerConfig = field(default_factory=rl.TrainerConfig)
    # `spmd-rl plan` counts on the engine's sleep while the trainer beside it trains
    engine_sleeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "prompts_per_step": 1, "sampling.num_samples": 2})
        rl.at_least(self, {"clip_low": 0, "clip_high": 0, "tis_cap": 0})
        rl.refuse_greedy(self.sampling)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_inputs(
        model=cfg.model,
        data=cfg.data,
        reward=cfg.reward,
        prompts=cfg.prompts,
        trainer=cfg.trainer,
        sampling=cfg.sampling,
    )
    rl.check_engine(cfg.engine, cfg.run)


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
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model), cfg.sampling)
    loss = partial(
        rl.grpo_loss,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        tis_cap=cfg.tis_cap or None,
    )
    tis = f"truncated importance sampling, tis_cap = {cfg.tis_cap:g}"
    rl.announce_correction(cfg.engine, tis if cfg.tis_cap else "none (tis_cap = 0)")

    for step in ctl.steps(cfg.steps, ctl.resume(trainer=trainer, prompts=prompts)):
        with ctl.phase("sync", awake=[trainer, rollout]):
            weights.push(version=step.index)
        with ctl.phase("rollout", awake=[rollout]):
            groups = rollout.generate.call(prompts.next(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train", awake=[trainer]):
            stats = trainer.train_step.call(rl.pack(groups, rl.group_advantage(groups)), loss)
        step.log(groups, stats)
    trainer.export_hf.call(str(ctl.run_folder / "hf"))
