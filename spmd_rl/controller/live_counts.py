"""Live counts: what roles count while a run goes on, summed by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of counts by name; a count of 0 stays."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
