"""Balanced partition of weighted items: Karmarkar-Karp differencing, pure and deterministic.

Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982, in its form for k
parts.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

# A partial solution: its non-empty parts as (weight, items), heaviest first.
Parts = list[tuple[int, list[int]]]


def balanced_partition(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the items `0 .. len(weights) - 1` into `num_parts` parts of nearly equal total weight.

    Each part lists its items in ascending order. With positive weights no part is empty unless
    there are fewer items than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    if num_parts == 1:
        return [list(range(len(weights)))]
    items_of_weight: defaultdict[int, list[int]] = defaultdict(list)
    for item, weight in enumerate(weights):
        items_of_weight[weight].append(item)
    parts, remainders = _deal_equal_weights(items_of_weight, num_parts)
    differenced = _difference(sorted(remainders), num_parts)
    sums = [sum(weights[item] for item in part) for part in differenced]
    # A dealt item lighter than the remaining difference could reduce it: difference all items.
    if parts[0] and max(sums) - min(sums) > min(weights[item] for item in parts[0]):
        return [sorted(part) for part in _difference(list(enumerate(weights)), num_parts)]
    return [sorted(part + more) for part, more in zip(parts, differenced, strict=True)]


def _deal_equal_weights(
    items_of_weight: Mapping[int, list[int]], num_parts: int
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Deal out the items of each weight in full rounds. Return the parts, and the items left over.

    Differencing would cancel equal weights against each other one by one, which is slow.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    remainders: list[tuple[int, int]] = []
    for weight, items in items_of_weight.items():
        num_dealt = len(items) - len(items) % num_parts
        for first, part in enumerate(parts):
            part += items[first:num_dealt:num_parts]
        remainders += [(item, weight) for item in items[num_dealt:]]
    return parts, remainders


def _difference(items: list[tuple[int, int]], num_parts: int) -> list[list[int]]:
    """Partition (item, weight) pairs, merging first the solutions whose parts differ most."""
    heap: list[tuple[int, int, Parts]] = []
    for item, weight in items:
        single: Parts = [(weight, [item])]
        heap.append((-_imbalance(single, num_parts), item, single))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_a, a = heapq.heappop(heap)
        _, first_b, b = heapq.heappop(heap)
        merged = _merge(a, b, num_parts)
        heapq.heappush(heap, (-_imbalance(merged, num_parts), min(first_a, first_b), merged))
    parts = [items_of_part for _, items_of_part in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _imbalance(parts: Parts, num_parts: int) -> int:
    """Return the difference in weight between the heaviest and the lightest part."""
    return parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0)


def _merge(a: Parts, b: Parts, num_parts: int) -> Parts:
    """Join each solution's heaviest parts with the lightest, or empty, parts of the other."""
    shared = range(max(num_parts - len(b), 0), len(a))
    both = [(a[i][0] + b[num_parts - 1 - i][0], a[i][1] + b[num_parts - 1 - i][1]) for i in shared]
    alone = a[: num_parts - len(b)] + b[: num_parts - len(a)]
    return sorted(both + alone, key=lambda part: (-part[0], part[1]))
