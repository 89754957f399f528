"""Settings of the policy update: which algorithm, and its regularisers and corrections.

A recipe's Config inherits `PolicyConfig`, so that its fields are keys of the recipe:
`--algorithm=dapo --kl.coef=0.001`. `make_algorithm` refuses what the chosen algorithm cannot do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spmd_rl.algo.packing import Aggregation
from spmd_rl.config.rules import at_least, require

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "gdpo",
    "gigpo",
    "turn_returns",
]
Estimator = Literal["k1", "k2", "k3", "low_var"]
Level = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["none", "truncate", "clip", "mask"]
Behaviour = Literal["old", "rollout"]


@dataclass(frozen=True)
class KlConfig:
    """Settings of the KL divergence from a reference model."""

    coef: float = 0.0  # weight of the divergence; 0: no reference model is loaded
    # auto: a reward in ppo, reinforce_pp and reinforce_pp_baseline, else a term of the loss
    place: Literal["auto", "loss", "reward"] = "auto"
    # auto: low_var in the loss; in the reward it is always k1
    estimator: Literal["auto", "k1", "k2", "k3", "low_var"] = "auto"
    unbiased: bool = False  # multiply the estimate by the ratio, with its gradient: k1 and k3
    reference: str = ""  # Hugging Face folder of the reference; "": the first weights of model
    refresh_every: int = 0  # steps after which the reference becomes the policy; 0: never

    def __post_init__(self) -> None:
        at_least(self, {"coef": 0, "refresh_every": 0})


@dataclass(frozen=True)
class CorrectionConfig:
    """Settings of the correction for samples that the trainer would draw with another probability.

    The ratio is that of the trainer to the engine. TIS is mode truncate, IcePop is mode mask with
    bounds of 0.5 and 5, and MIS is mode mask at the level of sequences.
    """

    # of a ratio outside the bounds: truncate to [0, high], clip to [low, high], mask: weight 0
    mode: CorrectionMode = "none"
    level: Level = "token"  # the ratio of a token, the product of a sequence, or its geometric mean
    high: float = 2.0  # largest weight
    low: float | None = None  # smallest weight; none: 1 / high
    mean_one: bool = False  # whether weights are divided by their mean over the batch
    # level of a second ratio, by which tokens or sequences are left out of the whole loss
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    reject_high: float = 2.0  # largest ratio that is not rejected
    reject_low: float | None = None  # smallest ratio that is not rejected; none: 1 / reject_high
    veto: float = 0.0  # a sequence with a token whose ratio is below this is rejected; 0: none

    def __post_init__(self) -> None:
        at_least(self, {"veto": 0})
        _check_bounds("low", self.low, "high", self.high)
        _check_bounds("reject_low", self.reject_low, "reject_high", self.reject_high)

    @property
    def corrects(self) -> bool:
        """Whether any part of the correction is on."""
        return self.mode != "none" or self.reject != "none" or self.veto > 0


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float) -> None:
    """Raises: ConfigError unless the bounds of a ratio are around 1."""
    require(high >= 1 and math.isfinite(high), high_name, high, "1 or more, and finite")
    require(low is None or 0 <= low <= 1, low_name, low, "between 0 and 1")


@dataclass(frozen=True)
class OverlongConfig:
    """Settings of DAPO's penalty on long answers."""

    buffer: int = 0  # tokens before sampling.max_tokens over which the penalty grows; 0: none
    penalty: float = 1.0  # what an answer of sampling.max_tokens loses

    def __post_init__(self) -> None:
        at_least(self, {"buffer": 0, "penalty": 0})


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Settings that choose how the policy learns from graded samples.

    `docs/algorithms.md` describes the algorithms, with the settings that each reads.
    """

    algorithm: AlgorithmName = "grpo"  # docs/algorithms.md says when to use which
    # the ratio of new to old probability is clipped below 1 - clip_low; none: the algorithm's own
    clip_low: float | None = None
    clip_high: float | None = None  # and above 1 + clip_high; none: the algorithm's own
    dual_clip: float = 0.0  # bound of the loss where the advantage is negative; 0: none
    # which log-probs the ratio is taken against: the trainer's own, or the engine's
    behaviour: Behaviour = "old"
    # how the losses of tokens become one number; auto: the algorithm's own
    aggregation: Literal["auto"] | Aggregation = "auto"
    entropy_coef: float = 0.0  # weight of the entropy bonus
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    # a sequence with a negative advantage is left out if its mean log-prob fell by more; 0: none
    opsm_delta: float = 0.0
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    mask_truncated: bool = False  # whether answers cut at sampling.max_tokens teach nothing
    # tokens of weights that are more versions behind than this teach nothing, and stay as context;
    # none: all teach
    mask_lag: int | None = None
    # whether groups with equal rewards are left out; none: only dapo leaves them out
    drop_equal_groups: bool | None = None
    # gdpo: weight of each part of the reward; {}: 1 for every part but "reward"
    reward_weights: dict[str, float] = field(default_factory=dict)
    discount: float = 1.0  # of later rewards: gamma
    turn_weight: float = 1.0  # gigpo: weight of the comparison of turns beside that of episodes
    gae_lambda: float = 1.0  # ppo: 1 trusts the rewards alone, 0 the critic alone
    value_clip: float = 0.2  # ppo: largest change of a value in one step; 0: any
    critic_warmup_steps: int = 0  # ppo: first steps, in which the critic alone learns
    first_settings: ClassVar[tuple[str, ...]] = ()  # of these, help shows shared ones first

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "0 or more")
        require(
            self.dual_clip == 0 or self.dual_clip > 1, "dual_clip", self.dual_clip, "more than 1"
        )
        least = ("entropy_coef", "turn_weight", "opsm_delta", "value_clip", "critic_warmup_steps")
        at_least(self, dict.fromkeys(least, 0))
        expected = "0 or more, or none"
        require(self.mask_lag is None or self.mask_lag >= 0, "mask_lag", self.mask_lag, expected)
        for name in ("discount", "gae_lambda"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "between 0 and 1")

    @property
    def correction_in_words(self) -> str:
        """The correction for log-probs that an engine computes in another way, as a clause."""
        if self.behaviour == "rollout":
            return "the ratio is taken against the engine's log-probs"
        cfg = self.correction
        parts = [f"{cfg.mode} at {cfg.high:g} by {cfg.level}"] if cfg.mode != "none" else []
        if cfg.reject != "none":
            parts.append(f"rejection above {cfg.reject_high:g} by {cfg.reject}")
        if cfg.veto:
            parts.append(f"veto below {cfg.veto:g}")
        return ", ".join(parts) or "none (correction.mode = none)"
