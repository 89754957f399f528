"""Settings of evaluations: which sets there are, how they are drawn and graded, and when.

[eval]                               --eval.data=test.jsonl
every = 20                           --eval.every=20
sampling.temperature = 0.0           --eval.sampling.temperature=0

[eval.sets.gsm]                      --eval.sets.gsm.data=gsm.jsonl
data = "gsm.jsonl"
reward = "math"                      --eval.sets.gsm.reward=math
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from spmd_rl.config.load import overlay
from spmd_rl.config.rules import at_least
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import ConfigError
from spmd_rl.evaluation.schedule import EvalSettings, name_of_file
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.signatures import reward_weights
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rollout.engine import SamplingConfig

DEFAULT_THRESHOLD = 1.0


@dataclass(frozen=True)
class EvalSet:
    """One set of prompts. What it does not say is as in `eval`, and else as in the run."""

    data: str  # file of prompts and answers; a slice as path@[a:b]
    num_samples: int | None = None  # of each prompt
    sampling: dict[str, Any] = field(default_factory=dict)  # settings other than eval.sampling's
    prompts: dict[str, Any] = field(default_factory=dict)  # settings other than eval.prompts's
    reward: str | dict[str, float] = ""  # one name, or a table of names and weights
    threshold: float | None = None  # least reward of a correct sample


@dataclass(frozen=True)
class EvalConfig(EvalSettings):
    """When a run evaluates, and with which sets. Without a set, it never does."""

    sets: dict[str, EvalSet] = field(default_factory=dict)  # several sets by their names
    seed: int = 0  # of the draws, which are the same in every evaluation
    num_samples: int = 1  # of each prompt
    # settings of sampling in which evaluations differ from the run, such as temperature
    sampling: dict[str, Any] = field(default_factory=dict)
    # settings of prompts in which evaluations differ from the run, such as prompt_key
    prompts: dict[str, Any] = field(default_factory=dict)
    # grades all sets, as the run's reward does; "": the run's own
    reward: str | dict[str, float] = ""
    threshold: float = DEFAULT_THRESHOLD  # least reward of a correct sample

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, {"num_samples": 1, "seed": 0})

    def named_sets(self) -> Mapping[str, EvalSet]:
        """Return the sets by name; a single one has the name of its file."""
        return {name_of_file(self.data): EvalSet(self.data)} if self.data else self.sets


class EvaluatedRecipe(Protocol):
    """What evaluations read of a recipe's config."""

    @property
    def model(self) -> str: ...
    @property
    def reward(self) -> str | dict[str, float]: ...
    @property
    def hooks(self) -> HookConfig: ...
    @property
    def graders(self) -> GraderConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def prompts(self) -> PromptConfig: ...
    @property
    def eval(self) -> EvalConfig: ...


@dataclass(frozen=True)
class ResolvedSet:
    """A set with all its settings. Without `reward`, the run's own reward grades it."""

    name: str
    data: str
    sampling: SamplingConfig
    prompts: PromptConfig
    reward: dict[str, float]
    threshold: float


def resolve_sets(
    cfg: EvalConfig, sampling: SamplingConfig, prompts: PromptConfig
) -> list[ResolvedSet]:
    """Return the sets, where `sampling` and `prompts` are those of the run.

    Raises: ConfigError, which names the key, for a setting that there is not or that cannot work.
    """
    # an evaluation trains nothing: it needs no sets of kept tokens
    base = replace(sampling, num_samples=cfg.num_samples, replay_filters=False, replay_routes=False)
    common = _overlaid(base, cfg.sampling, "eval.sampling")
    in_order = overlay(replace(prompts, shuffle=False), cfg.prompts, "eval.prompts")
    return [
        ResolvedSet(
            name,
            one.data,
            sampling=_overlaid(
                replace(common, num_samples=one.num_samples or cfg.num_samples),
                one.sampling,
                f"eval.sets.{name}.sampling",
            ),
            prompts=overlay(in_order, one.prompts, f"eval.sets.{name}.prompts"),
            reward=reward_weights(one.reward or cfg.reward),
            threshold=cfg.threshold if one.threshold is None else one.threshold,
        )
        for name, one in cfg.named_sets().items()
    ]


def eval_rewards(cfg: EvalConfig) -> list[str]:
    """Return the names of all reward functions that the sets name, each once."""
    rewards = [one.reward or cfg.reward for one in cfg.named_sets().values()]
    return list(dict.fromkeys(name for reward in rewards for name in reward_weights(reward)))


def _overlaid(base: SamplingConfig, settings: Mapping[str, Any], key: str) -> SamplingConfig:
    if "num_samples" in settings:
        raise ConfigError(f"{key}.num_samples: set {key.rpartition('.')[0]}.num_samples instead")
    return overlay(base, settings, key)
