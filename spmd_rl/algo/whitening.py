"""Whitening of advantages: mean 0 and variance 1 over the tokens of a whole batch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-8  # added to the variance


def whiten(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return (x - mean) / sqrt(variance + 1e-8), with the n - 1 variance; equal values give 0.

    Sums are exact, so the result does not depend on the order of the values.
    """
    if not len(values):
        return values.astype(np.float64)
    # less the least value, so that equal values become exactly 0
    shifted = values.astype(np.float64) - float(values.min())
    centred = shifted - math.fsum(shifted) / len(shifted)
    variance = math.fsum(centred * centred) / max(len(values) - 1, 1)
    return centred / math.sqrt(variance + EPSILON)
