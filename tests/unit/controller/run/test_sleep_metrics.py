"""What receipts add to the metrics of a step."""

from __future__ import annotations

from spmd_rl.controller.run.step_loop import sleep_metrics, span_arguments
from spmd_rl.offload.residency import Receipt

GIB = 1 << 30
SLEPT = [
    Receipt({"master": 2 * GIB, "moments": 4 * GIB}, {"master": 0, "moments": 0}, 6 * GIB, 0.1),
    Receipt({"master": GIB, "moments": 2 * GIB}, {"master": 0, "moments": 0}, 3 * GIB, 0.2),
]
WOKEN = [Receipt({"kv": 0}, {"kv": 5 * GIB})]


def test_the_rank_that_has_most_counts() -> None:
    assert sleep_metrics("sleep", SLEPT) == {"memory/copied_gib": 6.0, "memory/slept_gib": 6.0}


def test_a_wake_gives_nothing_back() -> None:
    assert sleep_metrics("wake", WOKEN) == {"memory/copied_gib": 0.0}


def test_the_trace_has_the_slowest_receipt() -> None:
    assert span_arguments(SLEPT)["before"] == {"master": GIB, "moments": 2 * GIB}
