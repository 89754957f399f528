"""Settings that several recipes have. The `Config` of a recipe extends one or two of these classes.

A field that a recipe states again has another default there, or another comment in `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.make import make_algorithm
from spmd_rl.config.run import RunConfig
from spmd_rl.data.pairs import PairConfig
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.environments.config import AgentConfig
from spmd_rl.evaluation.config import EvalConfig
from spmd_rl.evaluation.held_out_config import DocumentEvalConfig, HeldOutConfig
from spmd_rl.hooks.config import HookConfig
from spmd_rl.mesh.split import OF_ENGINE, PolicySplit, RoleSplit
from spmd_rl.model.foreign.names import is_foreign
from spmd_rl.offload.config import OffloadConfig
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.plain.config import in_place_of
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.train.config import TrainerConfig


@dataclass(frozen=True)
class InferSplit:
    infer: RoleSplit = field(default_factory=RoleSplit, metadata=OF_ENGINE)


@dataclass(frozen=True)
class TrainSplit:
    train: RoleSplit = field(default_factory=RoleSplit)


@dataclass(frozen=True, kw_only=True)
class AnyRecipe:
    """Settings of every recipe."""

    model: str  # Hugging Face folder; transformers:PATH is computed by transformers
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(AnyRecipe):
    """Settings of a recipe that takes train steps."""

    steps: int = 200  # training steps of the whole run
    epochs: float = 0.0  # passes over the data, instead of steps; 0: steps counts
    start_step: int = 0  # steps that a new run counts as done, with their data (docs/resume.md)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass(frozen=True, kw_only=True)
class EngineRecipe(AnyRecipe):
    """Settings of a recipe whose engine generates samples that are graded."""

    # module:function or path/to/file.py:function; several as a table of names and weights
    reward: str | dict[str, float] = "spmd_rl.rewards.answers.match:exact"
    prompts: PromptConfig = field(default_factory=PromptConfig)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(num_samples=8))
    engine: EngineConfig = field(default_factory=NativeEngineConfig)
    hooks: HookConfig = field(default_factory=HookConfig)
    graders: GraderConfig = field(default_factory=GraderConfig)

    def settled(self) -> Self:
        """Return the config with the plain engine, where transformers computes the model."""
        if not (is_foreign(self.model) and isinstance(self.engine, NativeEngineConfig)):
            return self
        return replace(self, engine=in_place_of(self.engine))


@dataclass(frozen=True, kw_only=True)
class DataRecipe(EngineRecipe):
    """Settings of a recipe whose engine draws prompts from its data, step by step."""

    # prompts: a file, or a table of files and weights (docs/data.md); a slice as path@[a:b]
    data: str | dict[str, float]
    prompts_per_step: int = 32  # each with sampling.num_samples samples


@dataclass(frozen=True, kw_only=True)
class PolicyRecipe(PolicyConfig, TrainingRecipe, DataRecipe):
    """Settings of a recipe that learns from its own samples, as `PolicyRun` makes its parts."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    split: PolicySplit = field(default_factory=PolicySplit)
    agent: AgentConfig = field(default_factory=AgentConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    # a model that only algorithm = "ppo" trains
    critic: TrainerConfig = field(default_factory=lambda: TrainerConfig(lr=1e-5))
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @cached_property
    def made_algorithm(self) -> Algorithm:
        """The algorithm with its settings."""
        return make_algorithm(
            self,
            num_samples=self.sampling.num_samples,
            max_response_tokens=self.sampling.max_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class SupervisedRecipe(TrainingRecipe):
    """Settings of a recipe that learns from data alone."""

    data: str | dict[str, float]
    eval: HeldOutConfig | DocumentEvalConfig = field(default_factory=HeldOutConfig)
    split: TrainSplit = field(default_factory=TrainSplit)


@dataclass(frozen=True, kw_only=True)
class PairRecipe(SupervisedRecipe):
    """Settings of a recipe that learns from pairs of answers."""

    # prompts with two answers: a file, or a table of files and weights (docs/data.md)
    data: str | dict[str, float]
    pairs_per_step: int = 32  # each a prompt with two answers
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    prompts: PairConfig = field(default_factory=PairConfig)
