"""SplitMix64, a generator of 64-bit random numbers from a counter or any other number.

Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
ODD = 0xD1342543DE82EF95  # hashes multiply a second number by it
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def next64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the generator's output for a state `x`."""
    x = x + np.uint64(GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def mix_(x: Tensor) -> Tensor:
    """Apply the generator's finaliser in place to int64, taken as unsigned."""
    x.bitwise_xor_(shift_right(x, 30)).mul_(signed(MIX_1))
    x.bitwise_xor_(shift_right(x, 27)).mul_(signed(MIX_2))
    return x.bitwise_xor_(shift_right(x, 31))


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64, taken as unsigned, logically."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """Return 64 bits as the signed number that torch takes."""
    return x - (1 << 64) if x >= 1 << 63 else x
