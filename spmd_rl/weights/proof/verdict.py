"""Verdict of a push: what the ranks found when they compared its ends (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.weights.plan.layout import Box


@dataclass(frozen=True)
class WeightMismatch:
    """A box that differs on `rank` from what the ranks in `sources` hold.

    With `is_replica`, both are sources. Without, `rank` received it from `sources`.
    """

    name: str
    box: Box
    rank: int
    sources: list[int]
    is_replica: bool

    @property
    def route(self) -> str:
        """How the box came to its rank: "copy", "buckets" or "copy+buckets"."""
        routes = {"copy": self.rank in self.sources, "buckets": {*self.sources} != {self.rank}}
        return "+".join(name for name, taken in routes.items() if taken)


@dataclass(frozen=True)
class Verification:
    """What one rank found in one push.

    Of the pieces of its sink, `num_equal` hold the bits of the source, `num_shared` are the memory
    of the source itself, and `num_unknown` could not be digested. `num_unequal` are not all in
    `mismatches`. `smallest` is the name of a small tensor that was compared; "" if there is none.
    """

    num_equal: int
    num_unequal: int
    num_shared: int
    num_unknown: int
    mismatches: list[WeightMismatch]
    smallest: str
    seconds: float
