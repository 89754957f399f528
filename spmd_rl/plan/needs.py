"""RunNeeds: what a run needs of ranks, memory and samples, as its recipe's config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.endpoint import Role
from spmd_rl.data.render.prompt_format import PromptFormat
from spmd_rl.environments.config import AgentConfig
from spmd_rl.evaluation.config import EvalConfig
from spmd_rl.offload.config import OffloadConfig
from spmd_rl.offload.phases import CONCURRENT, Phases
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.extra_role import ExtraRole
from spmd_rl.train.trainer import Trainer

TRAIN, INFER = "train", "infer"  # the roles that most runs have
_TYPES: dict[str, Any] = {
    "model": str,
    "run": RunConfig,
    "trainer": TrainerConfig,
    "critic": TrainerConfig,
    "engine": EngineConfig,
    "sampling": SamplingConfig,
    "prompts": PromptFormat,
    "eval": EvalConfig,
    "agent": AgentConfig,
}


@dataclass(frozen=True)
class RunNeeds:
    """The settings of a recipe's config that others than the recipe read, each with its type.

    A recipe need not have them all: what it has not is None, or the default here. `split` is a
    dataclass or mapping of `RoleSplit`.
    """

    model: str = ""
    run: RunConfig = RunConfig()  # noqa: RUF009  it is frozen
    split: object = None
    trainer: TrainerConfig | None = None
    critic: TrainerConfig | None = None
    engine: EngineConfig | None = None
    sampling: SamplingConfig | None = None
    prompts: PromptFormat | None = None
    eval: EvalConfig | None = None
    agent: AgentConfig = AgentConfig()  # noqa: RUF009  it is frozen
    prompts_per_step: int | None = None
    steps: int = 0
    epochs: float = 0.0
    nproc: int | None = None
    pushes: bool = True  # whether a trainer gives its weights to the engine
    phases: Phases = CONCURRENT
    offload: OffloadConfig = OffloadConfig(sleep="always")  # noqa: RUF009  it is frozen
    trainer_role: type[Role] = Trainer
    extra_roles: Callable[[], Sequence[ExtraRole]] = tuple

    @classmethod
    def of(cls, cfg: object) -> RunNeeds:
        """Return what a recipe's config says. What has another type than here counts as none."""
        given = {one.name: getattr(cfg, one.name, None) for one in fields(cls)}
        known = {
            name: value
            for name, value in given.items()
            if value is not None and isinstance(value, _TYPES.get(name, object))
        }
        return cls(**known)
