"""Counters of the scheduler, which `stats()` of the engine reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    """Totals since the engine was made.

    `num_recomputed_tokens` are those of requests that began again, after an eviction, a push or a
    stop, whose keys and values were no longer in the cache. A backlog step leaves requests waiting.
    `num_backlog_rows` sums the running rows of such steps.
    """

    num_submitted: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_retractions: int = 0
    num_aborts: int = 0
    num_partial_chunks: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_copied_tails: int = 0
    num_forks: int = 0
    num_scheduled_tokens: int = 0
    num_backlog_steps: int = 0
    num_backlog_rows: int = 0

    def add_backlog(self, num_rows: int) -> None:
        self.num_backlog_steps += 1
        self.num_backlog_rows += num_rows

    def add_admissions(self, num_rows: int, num_tokens: int, num_cached_tokens: int) -> None:
        """Count rows of `num_tokens` tokens each, of which the cache had `num_cached_tokens`."""
        self.num_admissions += num_rows
        self.num_lookup_tokens += num_rows * num_tokens
        self.num_hit_tokens += num_rows * num_cached_tokens
