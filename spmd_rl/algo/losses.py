"""Policy and supervised losses: functions from a micro-batch's tokens to the loss of each.

A loss takes a `LossInput`, or a `ValueInput` for a model with a value head. It returns the loss [M]
and a dict of measurements [M]. It never averages: the trainer multiplies by the batch's weights and
divides by its one denominator, and averages the measurements over the tokens. Keyword arguments are
settings of the algorithm; a recipe sets them with `functools.partial`.

Shape letter: M tokens in the loss mask of one micro-batch, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

from spmd_rl.algo.by_source import by_source
from spmd_rl.algo.policy.surrogates import ppo_surrogate, ratio_of
from spmd_rl.errors import ContractError

C = TypeVar("C")
# names of sums and metrics of the trainer, which a loss's measurements cannot have
RESERVED = {"loss", "tokens", "ratio", "square_ratio", "square_norm"}
RESERVED |= {f"train/{name}" for name in ("loss", "entropy", "grad_norm", "lr")}


@dataclass(frozen=True)
class Needs:
    """What a loss asks of the forward pass beyond log-probs, which every loss gets.

    entropy: the gradient of the entropy; without it the entropy is a measurement.
    candidates: log-probs of the token ids in the batch's column "candidates" [T, K], int32.
    """

    entropy: bool = False
    candidates: bool = False


@dataclass(frozen=True)
class LossInput:
    """All that a loss may read of a language model.

    `logprobs` carries a gradient; `entropy` and `candidate_logprobs` do where `Needs` asks for it.

    logprobs: under the weights being trained.
    old_logprobs: under the weights at the start of the train step, or the batch's column
        "old_logprobs" where it has one.
    rollout_logprobs: the engine's, when it drew the tokens.
    sequence: which of the micro-batch's `num_sequences` a token belongs to, in ascending order.
    columns: those of the batch, by name.
    candidate_logprobs: of the ids in the column "candidates".
    Shape: each [M] and fp32, but `sequence`, int64; `columns` are [M] or [M, K],
    `candidate_logprobs` is [M, K].
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    sequence: Tensor
    num_sequences: int = 1
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    candidate_logprobs: Tensor | None = None


@dataclass(frozen=True)
class ValueInput:
    """All that a loss may read of a model with a value head. `values` carries a gradient.

    A value is that of the state before its token. `sequence` and `columns` are as in `LossInput`.
    Shape: [M]; `columns` are [M] or [M, K].
    """

    values: Tensor
    sequence: Tensor
    num_sequences: int = 1
    columns: Mapping[str, Tensor] = field(default_factory=dict)


if TYPE_CHECKING:
    Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
else:
    Loss = Callable[..., Any]  # endpoints resolve it at run time, without torch


def grpo_loss(
    out: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behaviour: Literal["old", "rollout"] = "old",
    tis_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped surrogate: max(-ratio * A, -clip(ratio, 1 - low, 1 + high) * A).

    `behaviour` names the log-probs that the ratio is taken against: "old" ones of the trainer at
    the start of the step, or the engine's of the "rollout". The latter save a scoring pass for
    samples that are a version behind. `tis_cap` is truncated importance sampling: it multiplies by
    the detached weight min(exp(old - rollout), tis_cap), and needs "old".
    Source: Schulman et al. 2017 (PPO); Yu et al. 2025 (DAPO, clip-higher); Yao et al. 2025 (TIS).
    """
    if behaviour == "rollout" and tis_cap is not None:
        raise ValueError(
            "behaviour='rollout' already corrects for the engine; tis_cap would correct twice"
        )
    reference = out.rollout_logprobs if behaviour == "rollout" else out.old_logprobs
    ratio = ratio_of(out.logprobs - reference)
    loss, clipped = ppo_surrogate(ratio, out.advantages, clip_low=clip_low, clip_high=clip_high)
    if tis_cap is not None:
        loss = loss * (out.old_logprobs - out.rollout_logprobs).exp().clamp(max=tis_cap)
    return loss, {"train/clip_frac": clipped.float()}


def column_of(columns: Mapping[str, C], name: str, remedy: str) -> C:
    """Return a batch's column. Raises: ContractError without it, which says the remedy."""
    if name not in columns:
        raise ContractError(f"the batch has no column {name!r}: {remedy}")
    return columns[name]


def sft_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy of the tokens in the mask, and that of each source of several."""
    from torch import ones_like

    losses = -out.logprobs
    measured = {"loss": losses.detach()}
    return losses, by_source(out.columns, ones_like(losses), measured)


def checked(
    result: object, out: LossInput | ValueInput, loss: Loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what `loss` returned for `out`.

    Raises: ContractError unless each of its values is one a token.
    """
    name = getattr(getattr(loss, "func", loss), "__name__", "the loss")
    per_token, measured = _unpacked(name, result)
    shape = list(out.sequence.shape)
    for what, values in {"the loss": per_token, **measured}.items():
        _check_shape(name, what, values, shape)
    is_reserved = [key for key in measured if key in RESERVED or key.startswith("onpolicy/")]
    if is_reserved:
        raise ContractError(
            f"{name} measures {min(is_reserved)!r}, which the trainer has: choose another name"
        )
    return per_token, measured


def _unpacked(loss: str, result: object) -> tuple[Any, dict[str, Any]]:
    """Return what a loss returned as a pair. Raises: ContractError when it is none."""
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], dict):
        expected = "the loss of each token and a dict of measurements"
        raise ContractError(
            f"{loss} returned a {type(result).__name__}: expected two things, {expected}"
        )
    per_token, measured = result
    return per_token, measured


def _check_shape(loss: str, what: str, values: object, expected: list[int]) -> None:
    """Raises: ContractError unless `values` has the expected shape."""
    shape = getattr(values, "shape", None)
    if shape is None or list(shape) != expected:
        got = f"a {type(values).__name__}" if shape is None else f"the shape {list(shape)}"
        raise ContractError(
            f"{loss} returned {what} as {got}: expected {expected}, a value for each token in the "
            "loss mask, no mean or sum (the trainer weights them and divides by the batch's "
            "denominator)"
        )
