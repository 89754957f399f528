"""Index arithmetic for runs of different lengths that lie end to end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def offsets_within(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. size - 1 for each of `sizes`, end to end."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
