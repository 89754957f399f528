"""Loss of a critic: the squared error of its values, with PPO's clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.algo.losses import ValueInput

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(out: ValueInput, *, clip: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half of max((V - R)^2, (V_old + clip(V - V_old) - R)^2) of each token.

    The returns R and the values V_old at the start of the step are columns of the batch. The clip
    is to [-clip, clip]; 0 leaves it out.
    Source: Schulman et al. 2017 (PPO); the factor of one half as in TRL and verl.
    """
    returns, old_values = out.columns["returns"], out.columns["values"]
    error = (out.values - returns).square()
    if not clip:
        return error / 2, {"critic/value": out.values}
    moved = (out.values - old_values).clamp(-clip, clip)
    clipped_error = (old_values + moved - returns).square()
    measured = {
        "critic/value": out.values,
        "critic/clip_frac": (clipped_error > error).float(),
    }
    return error.maximum(clipped_error) / 2, measured
