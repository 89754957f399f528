"""Inputs of the op that norms and rotates query and key heads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QkNorm(NamedTuple):
    """RMS norm of every query and key head: weights [D], both given or neither, and epsilon."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


class Rotary(NamedTuple):
    """Each token's position [T], and the table's cosines and sines [P, R/2].

    The first R elements of a head are rotated: all D, or fewer.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
