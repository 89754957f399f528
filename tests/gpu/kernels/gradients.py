"""Gradient of a leaf after a backward pass."""

from __future__ import annotations

from torch import Tensor


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "the backward pass did not reach this leaf"
    return leaf.grad
