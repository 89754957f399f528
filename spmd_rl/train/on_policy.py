"""On-policy check: the trainer's log-probabilities beside those that the engine recorded.

Tokens that the current weights drew must have the same bits on both sides. Over all tokens that an
engine drew, the distance between the two is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.moe.route_hash import ROUTES
from spmd_rl.train.metric_sums import MetricSums
from spmd_rl.train.microbatch import MicroBatch

COMPARED = "onpolicy/compared_tokens"
COMPARED_SHARE = "onpolicy/compared_share"  # of the tokens that an engine drew
MISMATCHED = "onpolicy/mismatched_tokens"
MAX_DLOGP = "onpolicy/max_abs_dlogp"
MEAN_DLOGP = "onpolicy/mean_abs_dlogp"
TOKEN_COUNT = "tokens"  # the sum that averages divide by
K1, K3 = "onpolicy/k1", "onpolicy/k3"
FLIPS = "onpolicy/router_flips"  # tokens that went to other experts in the engine
DRAWN = "onpolicy/drawn_tokens"  # by an engine
# sums for this module alone, of the ratio trainer / engine
RATIO, SQUARE_RATIO = "ratio", "square_ratio"


def compare_with_rollout(
    logprobs: Tensor, micro: MicroBatch, version: int, sums: MetricSums
) -> None:
    """Add to `sums` the comparison of one micro-batch under the weights `version`.

    Shape: `logprobs` is [M], under the weights at the start of the train step.
    """
    current = micro.versions == version
    drawn = micro.versions >= 0
    distance = torch.where(drawn, logprobs - micro.rollout_logprobs, 0.0)
    bits, rollout_bits = logprobs.view(torch.int32), micro.rollout_logprobs.view(torch.int32)
    size, ratio_less_one = distance.abs(), distance.expm1()
    sums.add_each(
        {
            COMPARED: current,
            MISMATCHED: current & (bits != rollout_bits),
            TOKEN_COUNT: torch.ones_like(drawn),
            DRAWN: drawn,
            MEAN_DLOGP: size,
            K1: -distance,
            K3: ratio_less_one - distance,
            RATIO: ratio_less_one,
            SQUARE_RATIO: (2 * distance).expm1(),
        }
    )
    sums.add_maximum(MAX_DLOGP, size)


def compare_routes(
    routes: Tensor, micro: MicroBatch, version: int | None, sums: MetricSums
) -> None:
    """Add to `sums` the tokens that went to other experts in the engine than here.

    Shape: `routes` is [M] int32, under the weights `version`; None for those of no version, which
    are not compared.
    """
    if ROUTES not in micro.columns:
        return
    theirs = micro.columns[ROUTES]
    flipped = (routes != theirs) & (theirs != 0)  # 0 is that of a token whose routes are unknown
    compared = torch.zeros_like(flipped) if version is None else micro.versions == version
    sums.add(FLIPS, flipped & compared)


def on_policy_metrics(
    totals: dict[str, float], max_dlogp: float, compares_bits: bool
) -> dict[str, float]:
    """Return the metrics of this module, whose sums are removed from `totals`.

    There are none where no engine drew a token, and distances alone unless bits are compared.
    """
    num_drawn = totals.pop(DRAWN, 0.0)
    flips = {FLIPS: totals.pop(FLIPS)} if FLIPS in totals else {}
    names = (MEAN_DLOGP, K1, K3, RATIO, SQUARE_RATIO, MISMATCHED, COMPARED)
    sums = {name: totals.pop(name, 0.0) for name in names}
    if not num_drawn:
        return {}
    distances = {
        **{name: sums[name] / num_drawn for name in (MEAN_DLOGP, K1, K3)},
        **_ratio_metrics(sums[RATIO] / num_drawn, sums[SQUARE_RATIO] / num_drawn),
        MAX_DLOGP: max_dlogp,
    }
    if not compares_bits:
        return distances
    return {
        **distances,
        **{name: sums[name] for name in (MISMATCHED, COMPARED)},
        **flips,
        COMPARED_SHARE: sums[COMPARED] / num_drawn,
        DRAWN: num_drawn,
    }


def _ratio_metrics(mean: float, mean_square: float) -> dict[str, float]:
    """Return chi-square and effective sample size, from the means of ratio - 1 and ratio^2 - 1.

    No sample counts where all ratios are zero, to within rounding.
    """
    ess = (1 + mean) ** 2 / (1 + mean_square) if mean_square > -1 else 0.0
    return {"onpolicy/chi2": mean_square, "onpolicy/ess": ess}
