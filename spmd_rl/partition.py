"""Balanced partition of weighted items: Karmarkar-Karp differencing, pure and deterministic.

Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982, in its form for k parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the items `0 .. len(weights) - 1` into `num_parts` parts of nearly equal total weight.

    Each part lists its items in ascending order. With positive weights no part is empty unless there are fewer
    items than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts)]
    # A heap entry is one partial solution: its parts by descending weight, and the spread between the extremes.
    heap = [
        (-int(weight), item, [(int(weight), [item]), *empty[1:]])
        for item, weight in sorted(enumerate(weights), key=lambda pair: (-pair[1], pair[0]))
    ]
    if not heap:
        return [items for _, items in empty]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order_a, parts_a = heapq.heappop(heap)
        _, order_b, parts_b = heapq.heappop(heap)
        merged = _merge(parts_a, parts_b)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(order_a, order_b), merged))
    return [sorted(items) for _, items in heap[0][2]]


def _merge(a: list[tuple[int, list[int]]], b: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """Put the heaviest parts of one solution beside the lightest of the other."""
    pairs = zip(a, reversed(b), strict=True)
    joined = [(weight_a + weight_b, items_a + items_b) for (weight_a, items_a), (weight_b, items_b) in pairs]
    return sorted(joined, key=lambda part: (-part[0], not part[1], part[1]))
