"""Cases of the comparison with TRL: settings here, and TRL's settings that mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.algo.config import CorrectionConfig, KlConfig
from tests.unit.algo.cases import Answer

MAX_TOKENS = 10
Settings = dict[str, Any]


def no_factor(answers: list[Answer]) -> float:
    return 1.0


def ended_share(answers: list[Answer]) -> float:
    """Return all tokens over those of answers that ended: TRL divides by the latter."""
    ended = sum(sum(answer.learned) for answer in answers if answer.status == "completed")
    return sum(sum(answer.learned) for answer in answers) / ended


def differing_share(answers: list[Answer]) -> float:
    """Return the tokens of groups with different rewards over all: TRL divides by all."""
    rewards: dict[int, set[float]] = {}
    for answer in answers:
        rewards.setdefault(answer.prompt, set()).add(answer.reward)
    differing = sum(sum(a.learned) for a in answers if len(rewards[a.prompt]) > 1)
    return differing / sum(sum(answer.learned) for answer in answers)


def longest(answers: list[Answer]) -> float:
    return float(MAX_TOKENS)


@dataclass(frozen=True)
class Case:
    """Settings of `PolicyConfig` and of TRL's config, whose losses are to be equal.

    micros: micro-batches on both sides.
    vllm: whether TRL corrects for its engine.
    observations: whether tokens of tools are among the answers' in half of the draws.
    on_policy: whether the ratio is 1.
    loss_too: whether the values of the losses are compared, beside their gradients.
    factor: what our loss is multiplied with to have TRL's denominator.
    bar: whether equality is expected; else the row shows how far two definitions are apart.
    """

    algorithm: str
    settings: Settings
    trl: Settings
    trainer: str = "grpo"
    micros: int = 3
    vllm: bool = False
    observations: bool = True
    on_policy: bool = False
    loss_too: bool = True
    factor: Callable[[list[Answer]], float] = field(default=no_factor)
    bar: bool = True


DAPO = {"loss_type": "dapo"}
KL = KlConfig(coef=0.3, estimator="k3")
UNBIASED_KL = KlConfig(coef=0.3, estimator="k3", unbiased=True)
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


def corrected(mode: str, level: str, trl_mode: str, *, floor: bool) -> Case:
    """Return a case of truncated or masked importance sampling."""
    bounds = {"vllm_importance_sampling_clip_max": 1.5}
    if floor:
        bounds["vllm_importance_sampling_clip_min"] = 1 / 1.5
    return Case(
        "grpo",
        {"correction": CorrectionConfig(mode, level, high=1.5)},  # type: ignore[arg-type]
        DAPO | bounds | {"vllm_importance_sampling_mode": trl_mode},
        vllm=True,
    )


CASES: dict[str, Case] = {
    "grpo, loss_type dapo": Case("grpo", {}, DAPO),
    "grpo by sample, loss_type grpo": Case(
        "grpo", {"aggregation": "sample"}, {"loss_type": "grpo"}
    ),
    "grpo, loss_type bnpo, one micro-batch": Case("grpo", {}, {"loss_type": "bnpo"}, micros=1),
    "dr_grpo": Case("dr_grpo", {}, {"loss_type": "dr_grpo", "max_completion_length": MAX_TOKENS}),
    "dapo": Case("dapo", {"drop_equal_groups": False}, DAPO | {"epsilon_high": 0.28}),
    "dapo, equal groups left out": Case(
        "dapo", {}, DAPO | {"epsilon_high": 0.28}, micros=1, factor=differing_share
    ),
    "dapo, truncated answers masked": Case(
        "dapo",
        {"drop_equal_groups": False, "mask_truncated": True},
        DAPO | {"epsilon_high": 0.28, "mask_truncated_completions": True},
        observations=False,
        factor=ended_share,
    ),
    "gspo": Case("gspo", {}, SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4}),
    "gspo, wide": Case("gspo", {"clip_low": 0.09, "clip_high": 0.09}, SEQUENCE | {"epsilon": 0.09}),
    "cispo": Case("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, narrow": Case("cispo", {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "dual clip": Case("grpo", {"dual_clip": 1.5}, DAPO | {"delta": 1.5}),
    "KL k3": Case("grpo", {"kl": KL}, DAPO | {"beta": 0.3, "use_bias_correction_kl": False}),
    "KL k3, unbiased": Case(
        "grpo", {"kl": UNBIASED_KL}, DAPO | {"beta": 0.3, "use_bias_correction_kl": True}
    ),
    "entropy bonus, one micro-batch": Case(
        "grpo", {"entropy_coef": 0.02}, DAPO | {"entropy_coef": 0.02}, micros=1
    ),
    "OPSM": Case("grpo", {"opsm_delta": 0.02}, DAPO | {"off_policy_mask_threshold": 0.02}),
    "TIS by token": corrected("truncate", "token", "token_truncate", floor=False),
    "TIS by token, both bounds": corrected("clip", "token", "token_truncate", floor=True),
    "MIS by token": corrected("mask", "token", "token_mask", floor=True),
    "TIS by sequence": corrected("truncate", "sequence", "sequence_truncate", floor=False),
    "MIS by sequence": corrected("mask", "sequence", "sequence_mask", floor=True),
    "rloo, on policy, sums of answers": Case(
        "rloo",
        {"aggregation": "const"},
        {},
        trainer="rloo",
        observations=False,
        on_policy=True,
        loss_too=False,
        factor=longest,
    ),
    "bnpo is a mean of micro-batches' means": Case(
        "grpo", {}, {"loss_type": "bnpo"}, loss_too=False, bar=False
    ),
    "TRL's entropy bonus is a mean of micro-batches' means": Case(
        "grpo", {"entropy_coef": 0.02}, DAPO | {"entropy_coef": 0.02}, bar=False
    ),
    "TRL's RLOO clips the ratio of whole answers": Case(
        "rloo",
        {"aggregation": "const"},
        {},
        trainer="rloo",
        observations=False,
        loss_too=False,
        factor=longest,
        bar=False,
    ),
    "TRL's unbiased KL at the level of sequences has their ratio": Case(
        "gspo",
        {"clip_low": 0.09, "clip_high": 0.09, "kl": UNBIASED_KL},
        SEQUENCE | {"epsilon": 0.09, "beta": 0.3, "use_bias_correction_kl": True},
        bar=False,
    ),
}
