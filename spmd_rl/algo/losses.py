"""Losses: functions from what is known of each trained token to that token's loss.

A loss takes a `LossInput` and returns the loss [M] and a dict of measurements [M]. It never
averages: the trainer multiplies by the batch's weights and divides by its one denominator, and
averages the measurements over the tokens. Keyword arguments are the algorithm's knobs; a recipe
sets them with `functools.partial`.

Shape letter: M tokens in the loss mask of one micro-batch, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

from spmd_rl.errors import ContractError

# sums that the trainer keeps
TAKEN = {"loss", "tokens", "made_tokens", "ratio", "square_ratio", "square_norm"}
TAKEN |= {f"train/{name}" for name in ("loss", "entropy", "grad_norm", "lr")}


@dataclass(frozen=True)
class LossInput:
    """All a loss may look at. Only `lp` carries gradient; a loss that asks for one of `entropy` is
    refused.

    lp: log-probability under the weights being trained;  old: under the weights at the start of the
    train step; roll: the engine's, at decode time;  sequence: which sequence of the micro-batch a
    token belongs to.
    Shape: each [M] and fp32, but `sequence`, int64.
    """

    lp: Tensor
    old: Tensor
    roll: Tensor
    advantages: Tensor
    entropy: Tensor
    sequence: Tensor


if TYPE_CHECKING:
    Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
else:
    Loss = Callable[..., Any]  # endpoints resolve it at run time, without torch


def grpo_loss(
    out: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behaviour: Literal["old", "roll"] = "old",
    tis_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: max(-ratio * A, -clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    `behaviour`: whose log-probabilities the ratio is taken against: the trainer's at the start of
    the step, or the engine's (one pass fewer for samples that are a version behind). `tis_cap`
    multiplies by the detached weight min(exp(old - roll), tis_cap), truncated importance sampling;
    it corrects `old` alone.
    Source: Schulman et al. 2017 (PPO); Yu et al. 2025 (DAPO, clip-higher); Yao et al. 2025 (TIS).
    """
    if behaviour == "roll" and tis_cap is not None:
        raise ValueError(
            "behaviour='roll' already corrects for the engine; tis_cap would correct twice"
        )
    ratio = (out.lp - (out.roll if behaviour == "roll" else out.old)).exp()
    unclipped = -ratio * out.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * out.advantages
    loss = unclipped.maximum(clipped)
    if tis_cap is not None:
        loss = loss * (out.old - out.roll).exp().clamp(max=tis_cap)
    return loss, {"train/clip_frac": (clipped > unclipped).float()}


def sft_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the tokens in the mask."""
    return -out.lp, {}


def checked(result: object, out: LossInput, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss has returned for `out`. Raises: ContractError unless each of its values is one a
    token.
    """
    name = getattr(getattr(loss, "func", loss), "__name__", "the loss")
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], dict):
        expected = "the loss of each token and a dict of measurements"
        raise ContractError(
            f"{name} returned a {type(result).__name__}: expected two things, {expected}"
        )
    per_token, measured = result
    wanted = list(out.lp.shape)
    for what, values in {"the loss": per_token, **measured}.items():
        shape = getattr(values, "shape", None)
        if shape is None or list(shape) != wanted:
            got = f"a {type(values).__name__}" if shape is None else f"the shape {list(shape)}"
            raise ContractError(
                f"{name} returned {what} as {got}: expected {wanted}, a value for each token in the loss mask, no mean "
                "or sum (the trainer weights them and divides by the batch's denominator)"
            )
    if taken := sorted(what for what in measured if what in TAKEN or what.startswith("onpolicy/")):
        raise ContractError(
            f"{name} measures {taken[0]!r}, which the trainer has: choose another name"
        )
    return per_token, measured
