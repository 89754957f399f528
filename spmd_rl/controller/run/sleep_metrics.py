"""Metrics of sleep: what the receipts of a role's ranks add to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spmd_rl.offload.residency import Receipt

GIB = 1 << 30


def sleep_metrics(what: str, receipts: Sequence[Receipt]) -> dict[str, float]:
    """Return the metrics of one sleep or wake, of the rank that has most of each.

    The values of a step add up.
    """
    moved = max(abs(sum(one.before.values()) - sum(one.after.values())) for one in receipts)
    copied = max(one.copied_bytes for one in receipts)
    metrics = {"memory/copied_gib": copied / GIB}
    if what == "sleep":
        metrics["memory/slept_gib"] = moved / GIB
    return metrics


def span_arguments(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Return what a span of the trace says of one sleep or wake: the receipt of the rank that
    waited longest.
    """
    return asdict(max(receipts, key=lambda one: one.map_s + one.exposed_s))
