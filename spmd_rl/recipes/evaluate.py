"""Evaluate: the scores of a model on sets of prompts. Nothing is trained.

spmd-rl eval runs/grpo --data test.jsonl
spmd-rl eval --model PATH --data test.jsonl --reward module:function --sampling.num_samples=4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import spmd_rl as rl
from spmd_rl.check.inputs import check_model
from spmd_rl.environments.config import AgentConfig, agree_with_agent
from spmd_rl.environments.failures import refuse_failures
from spmd_rl.environments.make import check_agent
from spmd_rl.evaluation.config import EvalSet
from spmd_rl.evaluation.results import scores_table, write_scores
from spmd_rl.recipes import configs
from spmd_rl.recipes.evaluate_settings import settings_of_run


@dataclass(frozen=True)
class Config(configs.EngineRecipe):
    data: str = ""  # a file of prompts and answers (docs/data.md); a slice as path@[a:b]
    sets: dict[str, EvalSet] = field(default_factory=dict)  # several sets by name, not data
    # grades what no set grades itself: module:function or path/to/file.py:function; several as a
    # table of names and weights
    reward: str | dict[str, float] = "spmd_rl.rewards.answers.match:exact"
    threshold: float = 1.0  # least reward of a correct sample
    # whose weights replace the model's: a folder such as runs/grpo/checkpoints/step_000100; with
    # the settings of a run and without --model its newest
    checkpoint: str = ""
    seed: int = 0  # of the draws
    split: rl.PolicySplit = field(default_factory=rl.PolicySplit)
    sampling: rl.SamplingConfig = field(default_factory=rl.SamplingConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    # of the role that reads a checkpoint
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(init="random"))
    offload: rl.OffloadConfig = field(default_factory=rl.OffloadConfig)
    phases: ClassVar[rl.Phases] = rl.COLOCATED
    seldom_settings: ClassVar[tuple[str, ...]] = ("trainer",)  # nothing is trained

    def __post_init__(self) -> None:
        if not self.data and not self.sets:
            raise rl.ConfigError("there is no set: say --data FILE or --sets.NAME.data FILE")
        agree_with_agent(self)

    @classmethod
    def from_file(
        cls, table: dict[str, Any], given: Mapping[str, str], file: Path | None
    ) -> dict[str, Any]:
        """Return the settings of a file, which may be that of a run or of another recipe."""
        return settings_of_run(table, {field.name for field in fields(cls)}, given, file)

    @property
    def pushes(self) -> bool:
        """Whether a trainer gives the engine weights: those of a checkpoint."""
        return bool(self.checkpoint)

    @property
    def eval(self) -> rl.EvalConfig:
        """The sets, as the recipes that train have them."""
        return rl.EvalConfig(
            data=self.data,
            sets=self.sets,
            num_samples=self.sampling.num_samples,
            threshold=self.threshold,
            seed=self.seed,
        )


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    if cfg.checkpoint and not (Path(cfg.checkpoint) / "trainer").is_dir():
        raise rl.ConfigError(
            f"{cfg.checkpoint} is no checkpoint: name a folder such as "
            "runs/grpo/checkpoints/step_000100"
        )
    check_model(cfg.model, trainer=None if cfg.checkpoint else rl.TrainerConfig())
    rl.check_evaluation(cfg)
    check_agent(cfg.agent)
    rl.check_engine(cfg.engine, cfg.run, cfg.trainer if cfg.checkpoint else None)


def main(ctl: rl.Controller, cfg: Config) -> None:
    print(f"evaluating the weights of {cfg.checkpoint or cfg.model}", flush=True)
    roles, version = ctl.world.split(cfg.split), 0
    if cfg.checkpoint:
        trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
        version = trainer.load.call(str(Path(cfg.checkpoint) / "trainer"))
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **rl.rollout_settings(cfg))
    if cfg.checkpoint:
        with ctl.phase("sync"):
            ctl.link(trainer, rollout).push(version=version)
    bear = partial(refuse_failures, cfg=cfg.agent)
    evaluation = rl.Evaluation(ctl, cfg, rollout, num_steps=1, bear=bear)

    for _ in ctl.steps(1):
        scores = evaluation.run(0)
    facts = {"model": cfg.model, "checkpoint": cfg.checkpoint, "version": version}
    write_scores(ctl.run_folder / "eval.json", facts, scores)
    print(scores_table(scores), flush=True)
