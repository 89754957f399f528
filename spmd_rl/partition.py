"""Balanced partition of weighted items: Karmarkar-Karp differencing, pure and deterministic.

Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982, in its form for k parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# A partial solution: its parts that have items, as (weight, items), heaviest first.
Parts = list[tuple[int, list[int]]]


def balanced(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the items `0 .. len(weights) - 1` into `num_parts` parts of nearly equal total weight.

    Each part lists its items in ascending order. With positive weights no part is empty unless there are fewer
    items than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    if num_parts == 1:
        return [list(range(len(weights)))]
    # The solutions whose heaviest and lightest part differ most are merged first, so that they level out.
    heap: list[tuple[int, int, Parts]] = []
    for item, weight in enumerate(weights):
        single: Parts = [(int(weight), [item])]
        heap.append((-_spread(single, num_parts), item, single))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_a, a = heapq.heappop(heap)
        _, first_b, b = heapq.heappop(heap)
        merged = _merge(a, b, num_parts)
        heapq.heappush(heap, (-_spread(merged, num_parts), min(first_a, first_b), merged))
    parts = [sorted(items) for _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _spread(parts: Parts, num_parts: int) -> int:
    return parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0)


def _merge(a: Parts, b: Parts, num_parts: int) -> Parts:
    """Put the heaviest parts of each solution beside the lightest, or the empty, of the other."""
    shared = range(max(num_parts - len(b), 0), len(a))
    both = [(a[i][0] + b[num_parts - 1 - i][0], a[i][1] + b[num_parts - 1 - i][1]) for i in shared]
    alone = a[: num_parts - len(b)] + b[: num_parts - len(a)]
    return sorted(both + alone, key=lambda part: (-part[0], part[1]))
