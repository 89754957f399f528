"""Routes of tokens: the experts that an engine chose for them, in each mixture. numpy only.

They ride with a token as the column `EXPERT_IDS`, [R, L * K] for L mixtures and K experts of a
token, in ascending order within a mixture. A token has those of the row that it was drawn from,
which is that of the token before it. Zeros say that nothing was recorded: no two experts of a token
are the same, and a mixture of one expert a token is refused (model/layers/route_shape.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EXPERT_IDS = "expert_ids"
RouteIds = NDArray[np.uint8] | NDArray[np.uint16]


def dtype_of_ids(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the smallest dtype that holds the ids of so many experts."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def of_rows(routes: RouteIds, lengths: NDArray[np.integer]) -> RouteIds:
    """Return the routes of each token's own row, from those of the row before it.

    The row of a sequence's last token has none. Shape: routes [T, W], lengths [N] of the sequences,
    which lie end to end.
    """
    own = np.zeros_like(routes)
    own[:-1] = routes[1:]
    own[np.cumsum(lengths)[lengths > 0] - 1] = 0
    return own
