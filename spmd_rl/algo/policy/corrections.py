"""Corrections for samples that the trainer would draw with another probability than the engine.

`correction_weights` are importance weights of the policy term. `outside` and `vetoed` mark tokens
that leave the whole loss. All come from the ratio trainer / engine, carry no gradient, and leave
weights and denominators of the batch as they are.

Source: Yao et al. 2025 (TIS); Ling team 2025 (IcePop); Liu et al. 2025 (MIS, geometric level and
veto).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from spmd_rl.algo.config import CorrectionMode, Level
from spmd_rl.algo.policy.sequence_sums import over_sequences

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Ratio = TypeVar("Ratio", "Tensor", "NDArray[np.float64]")

MAX_LOG_RATIO = 20.0  # whose exp float32 holds


def level_ratio(log_ratio: Tensor, level: Level, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the ratio of each token, or of its sequence: the product, or the geometric mean.

    Raises: ValueError for an unknown level.
    """
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level = {level!r}: expected token, sequence or geometric")
    if level == "sequence":
        log_ratio = over_sequences(log_ratio, sequence, num_sequences, "sum")
    if level == "geometric":
        log_ratio = over_sequences(log_ratio, sequence, num_sequences, "mean")
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def correction_weights(
    ratio: Ratio, mode: CorrectionMode, *, high: float, low: float | None = None
) -> Ratio:
    """Return the weight of each token's policy loss; `low` None is 1 / `high`.

    truncate: min(ratio, high). clip: the ratio within [low, high]. mask: the ratio within
    [low, high], and 0 outside.
    Raises: ValueError for an unknown mode.
    """
    floor = 1 / high if low is None else low
    if mode == "truncate":
        return ratio.clip(None, high)
    if mode == "clip":
        return ratio.clip(floor, high)
    if mode == "mask":
        return ratio * ((ratio >= floor) & (ratio <= high))
    raise ValueError(f"mode = {mode!r}: expected truncate, clip or mask")


def outside(ratio: Tensor, *, high: float, low: float | None = None) -> Tensor:
    """Return whether each ratio is outside [low, high]; `low` None is 1 / `high`."""
    floor = 1 / high if low is None else low
    return (ratio < floor) | (ratio > high)


def vetoed(ratio: Tensor, threshold: float, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return whether each token's sequence has a token whose ratio is below `threshold`."""
    return over_sequences(ratio, sequence, num_sequences, "min") < threshold
