"""Policy loss: a surrogate with correction, off-policy masking, KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spmd_rl.algo.algorithm import REFERENCE_LOGPROBS
from spmd_rl.algo.config import Behaviour, CorrectionMode, Estimator, Level
from spmd_rl.algo.losses import LossInput
from spmd_rl.algo.policy import corrections
from spmd_rl.algo.policy.kl import kl_loss
from spmd_rl.algo.policy.opsm import opsm_masked
from spmd_rl.algo.policy.surrogates import cispo_surrogate, gspo_ratio, ppo_surrogate, ratio_of
from spmd_rl.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor


Surrogate = Literal["ppo", "gspo", "cispo"]


def policy_loss(
    out: LossInput,
    *,
    surrogate: Surrogate = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behaviour: Behaviour = "old",
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "low_var",
    kl_unbiased: bool = False,
    entropy_coef: float = 0.0,
    opsm_delta: float = 0.0,
    correction: CorrectionMode = "none",
    correction_level: Level = "token",
    correction_high: float = 2.0,
    correction_low: float | None = None,
    reject: Level | Literal["none"] = "none",
    reject_high: float = 2.0,
    reject_low: float | None = None,
    veto: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weight * surrogate + kl_coef * KL - entropy_coef * entropy of each token.

    The ratio is against the `behaviour`: the trainer's log-probs at the start of the step ("old"),
    or the engine's ("rollout"). The weight corrects for trainer against engine; it and `opsm_delta`
    act on the surrogate. `reject` and `veto` remove a token's whole loss, but no denominator.

    Raises: ValueError for a correction of the ratio against the engine, which would correct twice.
    """
    weighting = _Weighting(correction, correction_level, correction_high, correction_low)
    rejection = _Rejection(reject, reject_high, reject_low, veto)
    before = _behaviour_logprobs(out, behaviour, weighting.is_on or rejection.is_on)
    log_ratio = out.logprobs - before
    ratio = ratio_of(log_ratio)
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    loss, clipped = _surrogate_loss(out, before, ratio, surrogate, bounds, dual_clip)
    measured = {"train/clip_frac": clipped.float(), "train/ppo_kl": -log_ratio.detach()}
    if weighting.is_on:
        measured["train/correction_weight"] = weight = _weights(out, weighting)
        loss = loss * weight
    if opsm_delta:
        masked = opsm_masked(out, before, delta=opsm_delta)
        loss = loss.masked_fill(masked, 0.0)
        measured["train/opsm_frac"] = masked.float()
    if kl_coef:
        measured["train/kl"] = kl = _kl_term(out, kl_estimator, ratio if kl_unbiased else None)
        loss = loss + kl_coef * kl
    if entropy_coef:
        loss = loss - entropy_coef * out.entropy
    if rejection.is_on:
        rejected = _rejected(out, rejection)
        loss = loss.masked_fill(rejected, 0.0)
        measured["train/rejected_frac"] = rejected.float()
    return loss, measured


@dataclass(frozen=True)
class _Weighting:
    """The keywords of `policy_loss` for a weight from the ratio trainer / engine."""

    mode: CorrectionMode
    level: Level
    high: float
    low: float | None

    @property
    def is_on(self) -> bool:
        return self.mode != "none"


@dataclass(frozen=True)
class _Rejection:
    """The keywords of `policy_loss` for what leaves the loss by the ratio trainer / engine."""

    level: Level | Literal["none"]
    high: float
    low: float | None
    veto: float

    @property
    def is_on(self) -> bool:
        return self.level != "none" or self.veto > 0


def _behaviour_logprobs(out: LossInput, behaviour: Behaviour, corrects: bool) -> Tensor:
    """Return the log-probs that the ratio is taken against.

    Raises: ValueError for the engine's together with a correction.
    """
    if behaviour == "old":
        return out.old_logprobs
    if corrects:
        raise ValueError("behaviour='rollout' corrects for the engine already: drop the correction")
    return out.rollout_logprobs


def _kl_term(out: LossInput, estimator: Estimator, ratio: Tensor | None) -> Tensor:
    """Return the divergence from the reference.

    Raises: ContractError for a batch without the reference's log-probs.
    """
    if REFERENCE_LOGPROBS not in out.columns:
        raise ContractError(
            f"a KL term reads the column {REFERENCE_LOGPROBS!r}: add it with batch.with_columns"
        )
    return kl_loss(out.logprobs, out.columns[REFERENCE_LOGPROBS], estimator, ratio)


def _surrogate_loss(
    out: LossInput,
    before: Tensor,
    ratio: Tensor,
    surrogate: Surrogate,
    bounds: dict[str, float],
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the surrogate's loss, and whether each token was clipped.

    `bounds` are those of the ratio; `dual_clip` bounds the loss where the advantage is negative.
    Raises: ValueError for an unknown surrogate.
    """
    if surrogate == "cispo":
        return cispo_surrogate(ratio, out.advantages, out.logprobs, **bounds)
    if surrogate == "gspo":
        ratio = gspo_ratio(out.logprobs, before, out.sequence, out.num_sequences)
    elif surrogate != "ppo":
        raise ValueError(f"surrogate = {surrogate!r}: expected ppo, gspo or cispo")
    return ppo_surrogate(ratio, out.advantages, **bounds, dual_clip=dual_clip)


def _engine_ratio(out: LossInput, level: Level) -> Tensor:
    """Return the ratio trainer / engine at the start of the step, at a level."""
    log_ratio = out.old_logprobs - out.rollout_logprobs
    return corrections.level_ratio(log_ratio, level, out.sequence, out.num_sequences)


def _weights(out: LossInput, by: _Weighting) -> Tensor:
    """Return the weight of each token's policy loss."""
    ratio = _engine_ratio(out, by.level)
    return corrections.correction_weights(ratio, by.mode, high=by.high, low=by.low)


def _rejected(out: LossInput, by: _Rejection) -> Tensor:
    """Return which tokens are rejected by their ratio, or vetoed with their sequence."""
    token_ratio = _engine_ratio(out, "token")
    rejected = token_ratio < 0  # of none
    if by.level != "none":
        ratio = _engine_ratio(out, by.level)
        rejected = rejected | corrections.outside(ratio, high=by.high, low=by.low)
    if by.veto:
        split = out.sequence, out.num_sequences
        rejected = rejected | corrections.vetoed(token_ratio, by.veto, *split)
    return rejected
