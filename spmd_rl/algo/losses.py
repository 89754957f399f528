"""Losses: functions from what is known of each trained token to that token's loss.

A loss takes a `LossInput` and returns the loss [M] and a dict of measurements [M]. It never averages: the trainer
multiplies by the batch's weights and divides by its one denominator, and averages the measurements over the tokens.
Keyword arguments are the algorithm's knobs; a recipe sets them with `functools.partial`.

Shape letter: M tokens in the loss mask of one micro-batch, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInput:
    """All a loss may look at. Only `lp` carries gradient.

    lp: log-probability under the weights being trained;  old: under the weights at the start of the train step;
    roll: the engine's, at decode time;  sequence: which sequence of the micro-batch a token belongs to.
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

    `behaviour`: whose log-probabilities the ratio is taken against: the trainer's at the start of the step, or the
    engine's (one pass fewer for samples that are a version behind). `tis_cap` multiplies by the detached weight
    min(exp(old - roll), tis_cap), truncated importance sampling; it corrects `old` alone.
    Source: Schulman et al. 2017 (PPO); Yu et al. 2025 (DAPO, clip-higher); Yao et al. 2025 (TIS).
    """
    if behaviour == "roll" and tis_cap is not None:
        raise ValueError("behaviour='roll' already corrects for the engine; tis_cap would correct twice")
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
