"""Programs of a launch over runs of different sizes, each of which is cut into equal chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def programs_of(sizes: NDArray[np.int64], chunk_size: int) -> NDArray[np.int64]:
    """Return the run and the chunk of each program. Shape: sizes [N]; returns [programs, 2]."""
    counts = -(-sizes // chunk_size)
    runs = np.repeat(np.arange(len(sizes)), counts)
    chunks = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([runs, chunks], axis=1)
