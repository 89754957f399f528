"""Sums of equal parts whose order of additions does not depend on how the parts are grouped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sum_neighbours(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum: neighbours are added, then neighbours of these sums. Overwrites the parts.

    So a power of two of consecutive parts may be added elsewhere before, if the first of them is a
    multiple of their number. The result is the memory of the first part.
    """
    while len(parts) > 1:
        for left, right in zip(parts[::2], parts[1::2], strict=False):
            left.add_(right)
        parts = parts[::2]
    return parts[0]
