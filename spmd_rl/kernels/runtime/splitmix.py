"""SplitMix64: from a number that counts up in steps of `GAMMA`, or any other, 64 bits that look
random.

Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
ODD = 0xD1342543DE82EF95  # what hashes multiply a second number by
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def next64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator's output for a state `x`."""
    x = x + np.uint64(GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def mix_(x: Tensor) -> Tensor:
    """The generator's finaliser, in place, of int64 taken as unsigned."""
    x.bitwise_xor_(shift_right(x, 30)).mul_(signed(MIX_1))
    x.bitwise_xor_(shift_right(x, 27)).mul_(signed(MIX_2))
    return x.bitwise_xor_(shift_right(x, 31))


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 taken as unsigned."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """64 bits as torch takes them."""
    return x - (1 << 64) if x >= 1 << 63 else x
