"""Returns and advantages of tokens from their rewards, along each sequence.

Tokens outside the mask, such as those of a tool, are passed over: the token after them follows the
one before them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import offsets_of


def discounted_returns(
    rewards: NDArray[np.float64], lengths: NDArray[np.int64], *, discount: float
) -> NDArray[np.float64]:
    """Return G_t = r_t + discount * G_(t+1) of each token; after the last token it is 0.

    Shape: `rewards` and the result hold all sequences end to end; `lengths` is [N].
    """
    returns = np.zeros(len(rewards))
    ends = offsets_of(lengths)[1:]
    following = np.zeros(len(lengths))
    # from the last token of every sequence to the first of the longest
    for distance in range(1, int(lengths.max(initial=0)) + 1):
        has_token = lengths >= distance
        tokens = ends[has_token] - distance
        following[has_token] = rewards[tokens] + discount * following[has_token]
        returns[tokens] = following[has_token]
    return returns


def gae(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    *,
    discount: float,
    gae_lambda: float,
) -> NDArray[np.float64]:
    """Return A_t = delta_t + discount * lambda * A_(t+1), with delta_t = r_t + discount * V_(t+1) -
    V_t; the value after the last token is 0.

    Shape: as in `discounted_returns`.
    Source: Schulman et al. 2016 (GAE).
    """
    next_values = np.append(values[1:], 0.0)[: len(values)]
    ends = offsets_of(lengths)[1:]
    next_values[ends[lengths > 0] - 1] = 0.0
    deltas = rewards + discount * next_values - values
    return discounted_returns(deltas, lengths, discount=discount * gae_lambda)
