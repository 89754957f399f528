"""Differences beyond rounding: sentences on a comparison that allows a tolerance."""

from __future__ import annotations

from collections.abc import Iterator

from spmd_rl.microscope.diagnose.compare import Comparison, PointResult
from spmd_rl.microscope.replay.case import ReplayCase


def first_beyond(comparison: Comparison, tolerance: float) -> PointResult | None:
    """Return the first point whose outputs differ by more than rounding on the same input."""
    return next(
        (
            result
            for result in comparison.results
            if result.status == "introduced" and not result.largest_share <= tolerance
        ),
        None,
    )


def tolerance_sentences(
    comparison: Comparison, case: ReplayCase, tolerance: float
) -> Iterator[str]:
    """Yield where the sides part by more than rounding, and how far their log-probs are apart."""
    first = first_beyond(comparison, tolerance)
    if first is None:
        largest = max(result.largest_share for result in comparison.results)
        yield (
            f"Within rounding they agree: on the same input no output differs by more than "
            f"{largest:.2g} of its row's largest; the tolerance is {tolerance:.2g}."
        )
    else:
        name, position = case.locate(first.worst_row)
        yield (
            f"Beyond rounding they part at {first.point}: on the same input outputs differ by up "
            f"to {first.largest_share:.2g} of their row's largest, at {name} position {position}; "
            f"the tolerance is {tolerance:.2g}."
        )
    yield from _logprob_sentence(comparison)


def _logprob_sentence(comparison: Comparison) -> Iterator[str]:
    logprobs = comparison.logprobs
    if logprobs is not None and len(logprobs.rows):
        differences = (logprobs.left - logprobs.right).abs()
        yield (
            f"Log-probs differ by {float(differences.mean()):.2g} on average, "
            f"{float(differences.max()):.2g} at most."
        )
