"""Protocols of recipes' configs: what the functions that several recipes share read of them."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import KlConfig
from spmd_rl.config.run import RunConfig
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.environments.config import AgentConfig
from spmd_rl.evaluation.config import EvaluatedRecipe
from spmd_rl.hooks.config import HookConfig
from spmd_rl.mesh.split import Split
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.train.config import TrainerConfig


class TrainingRecipe(Protocol):
    """A recipe that takes train steps."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def steps(self) -> int: ...
    @property
    def epochs(self) -> float: ...
    @property
    def start_step(self) -> int: ...
    @property
    def trainer(self) -> TrainerConfig: ...


class EngineRecipe(Protocol):
    """A recipe whose engine generates samples that are graded."""

    @property
    def model(self) -> str: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def reward(self) -> str | dict[str, float]: ...
    @property
    def hooks(self) -> HookConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...


class DataRecipe(EngineRecipe, Protocol):
    """A recipe whose prompts are drawn from its data, step by step."""

    @property
    def data(self) -> str | dict[str, float]: ...
    @property
    def prompts(self) -> PromptConfig: ...
    @property
    def prompts_per_step(self) -> int: ...


class PolicyRecipe(TrainingRecipe, DataRecipe, EvaluatedRecipe, Protocol):
    """A recipe that learns from its own samples, as `PolicyRun` makes its parts."""

    @property
    def split(self) -> Split: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def sampler(self) -> SamplerConfig: ...
    @property
    def agent(self) -> AgentConfig: ...
    @property
    def critic(self) -> TrainerConfig: ...
    @property
    def critic_warmup_steps(self) -> int: ...
    @property
    def value_clip(self) -> float: ...
    @property
    def mask_lag(self) -> int | None: ...
    @property
    def kl(self) -> KlConfig: ...
    @property
    def correction_in_words(self) -> str: ...
    @property
    def made_algorithm(self) -> Algorithm: ...
