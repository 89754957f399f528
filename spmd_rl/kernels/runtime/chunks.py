"""Chunks of equal size, into which runs of different sizes are cut for the programs of a launch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def chunks_of(sizes: NDArray[np.int64], chunk_size: int) -> NDArray[np.int64]:
    """Return the run of each chunk, and its number in it. Shape: sizes [N]; returns [chunks, 2]."""
    counts = -(-sizes // chunk_size)
    runs = np.repeat(np.arange(len(sizes)), counts)
    chunks = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([runs, chunks], axis=1)
