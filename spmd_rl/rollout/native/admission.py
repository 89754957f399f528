"""Admission: waiting requests get a row of the table and pages for all their tokens.

The samples of one prompt compute it once. Samples that are admitted in the step that computes the
prompt's last token fork from it: they share its full pages, get a copy of the last page after the
step, and draw from the same logits. Later samples share the full pages. If the prompt leaves a long
tail on its last page, they are delayed until the tail can be copied, and then compute one token.

With recorded decoding steps nobody forks: such a step computes a last token for less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.counters import SchedulerCounters
from spmd_rl.rollout.native.pages import PagePool
from spmd_rl.rollout.native.prefix_sharing import PrefixKeys, PrefixSharing
from spmd_rl.rollout.native.sequence_table import SHARED_PAGE, Fork, SequenceTable
from spmd_rl.rollout.native.step_budget import StepBudget
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.rollout.waiting_queue import WaitingQueue


class _Allocation(NamedTuple):
    """Pages of a new row; its first `num_cached` tokens have K/V there.

    `tail_copy` is (source page, target page) if the tail of the prompt is copied, and `states` the
    slot of the states after these tokens if layers have any.
    """

    pages: list[int]
    num_cached: int
    tail_copy: tuple[int, int] | None
    states: int | None


@dataclass
class _AdmittedWork:
    """What the admissions of one step add to its plan."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    states_before: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    delayed: list[Request] = field(default_factory=list)

    def add(self, row: int, start: int, length: int) -> None:
        self.rows.append(row)
        self.starts.append(start)
        self.lengths.append(length)


class Admission:
    """Admits requests from `waiting` into `running`, which are the scheduler's own containers.

    `num_delayed` counts the requests that the last step delayed for the tail of their prompt.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: list[int],
        table: SequenceTable,
        pool: PagePool,
        prefixes: PrefixSharing,
        counters: SchedulerCounters,
        *,
        eos_ids: tuple[int, ...],
        separate_prefill: bool,
        forks: bool,
    ) -> None:
        self.num_delayed = 0
        # rows since the last `take_admitted`, and the tokens of each that were computed before
        self.admitted: list[tuple[int, int]] = []
        self._waiting = waiting
        self._running = running
        self._table = table
        self._pool = pool
        self._prefixes = prefixes
        self._counters = counters
        self._eos_ids = eos_ids
        self._separate_prefill = separate_prefill
        self._forks = forks

    def extend(self, plan: StepPlan, budget: StepBudget) -> StepPlan:
        """Return `plan` with the work of new admissions, while rows, pages and `budget` last."""
        work = _AdmittedWork()
        while self._waiting and self._table.num_free > len(work.delayed):
            request = self._waiting.popleft()
            prefix = self._prefixes.keys_of(request)
            if budget.num_tokens and self._prefixes.is_tail_in_progress(prefix):
                work.delayed.append(request)
                continue
            row = self._start_row(request, prefix, work) if budget.num_tokens else None
            if row is None:
                self._waiting.appendleft(request)
                break
            self._running.append(row)
            self.admitted.append((row, int(self._table.num_computed[row])))
            self._add_work(row, request, budget, work)
        self._waiting.extendleft(reversed(work.delayed))
        self.num_delayed = len(work.delayed)
        self._table.fill_forks(work.forks)
        if not work.rows:
            return replace(plan, copies_before=work.copies_before, states_before=work.states_before)
        return StepPlan(
            np.concatenate([plan.rows, np.array(work.rows)]),
            np.concatenate([plan.starts, np.array(work.starts)]),
            np.concatenate([plan.lengths, np.array(work.lengths)]),
            work.copies_before,
            self._copies_after(work.forks),
            work.states_before,
        )

    def _copies_after(self, forks: list[Fork]) -> list[tuple[int, int]]:
        return [
            (self._table.last_page(fork.parent), fork.last_page)
            for fork in forks
            if fork.last_page != SHARED_PAGE
        ]

    def _add_work(
        self, row: int, request: Request, budget: StepBudget, work: _AdmittedWork
    ) -> None:
        """Plan a chunk of the new `row`, and forks of it."""
        start, length = int(self._table.num_computed[row]), int(self._table.length[row])
        if self._separate_prefill and length - start == 1:
            return  # the row joins the next decoding step
        chunk = budget.take(start, self._prefixes.num_before_stop(row, start, length - start))
        if start + chunk < length:
            self._counters.num_partial_chunks += 1
        if not chunk:
            return  # no time is left in this step
        self._prefixes.publish_pages(row, (start + chunk) // self._table.page_size)
        work.add(row, start, chunk)
        if start + chunk == length:
            for fork in self._fork(row, request, work):
                work.add(fork, length, 0)

    def _start_row(self, request: Request, prefix: PrefixKeys, work: _AdmittedWork) -> int | None:
        """Give `request` a row with all its pages; return None if the pool has too few."""
        allocation = self._allocate(request, prefix)
        if allocation is None:
            return None
        sampling, num_cached = request.sampling, allocation.num_cached
        stop_ids = sampling.stop_ids + (() if sampling.ignore_eos else self._eos_ids)
        row = self._table.add(request, allocation.pages, num_computed=num_cached, stop_ids=stop_ids)
        self._prefixes.add_row(row, prefix)
        self._counters.add_admissions(1, request.num_tokens, num_cached)
        if len(request.past):  # all but its last token had been computed
            self._counters.num_recomputed_tokens += request.num_tokens - 1 - num_cached
        if allocation.tail_copy is not None:
            work.copies_before.append(allocation.tail_copy)
            self._counters.num_copied_tails += 1
        if allocation.states is not None:
            work.states_before.append((allocation.states, row))
        if num_cached < request.num_tokens - 1:
            self._prefixes.begin_tail(row, prefix, request)
        return row

    def _allocate(self, request: Request, prefix: PrefixKeys) -> _Allocation | None:
        """Return pages for all tokens of `request`, or None if the pool has too few.

        One page for each running row stays free, so that an admission does not soon preempt itself.
        """
        page_size = self._table.page_size
        num_needed = -(-request.num_tokens // page_size)
        cached, tail, num_cached, states = self._prefixes.find(request, prefix)
        retained = cached if tail is None else [*cached, tail]
        self._pool.retain(retained)
        num_new = num_needed - len(cached)
        if tail is not None and self._pool.num_available < num_new:
            # The pool is so small that the row needs the tail's page itself.
            if states is None:
                self._pool.release([tail])
                retained, tail, num_cached = cached, None, len(cached) * page_size
            else:
                self._pool.release(retained)
                retained, cached, tail, num_cached, states = [], [], None, 0, None
                num_new = num_needed
        if self._pool.num_available < num_new + len(self._running):
            self._pool.release(retained)
            return None
        new = [self._pool.allocate() for _ in range(num_new)]
        if tail is None:
            return _Allocation(cached + new, num_cached, None, states)
        self._pool.release([tail])
        return _Allocation(cached + new, num_cached, (tail, new[0]), states)

    def _fork(self, parent: int, request: Request, work: _AdmittedWork) -> list[int]:
        """Return new rows for the next samples of `request`'s prompt, forked from row `parent`.

        This step computes the parent's last token.
        """
        num_full_pages, rest = divmod(request.num_tokens, self._table.page_size)
        siblings = self._take_siblings(request, needs_page=rest > 0, num_kept=len(work.delayed))
        if not siblings:
            return []
        shared = self._table.page_list(parent)[:num_full_pages]
        rows = self._table.reserve(siblings)
        for row in rows:
            work.forks.append(Fork(row, parent, self._pool.allocate() if rest else SHARED_PAGE))
            self._pool.retain(shared)
            self._prefixes.copy_row(row, parent)
        self._running += rows
        self.admitted += [(row, request.num_tokens) for row in rows]
        self._counters.num_forks += len(rows)
        self._counters.add_admissions(len(rows), request.num_tokens, request.num_tokens)
        return rows

    def _take_siblings(self, request: Request, needs_page: bool, num_kept: int) -> list[Request]:
        """Take from the queue the next samples that can fork from `request`.

        They are as many as pages allow, and as rows besides `num_kept`. Only samples without an
        answer so far fork.
        """
        if not self._forks or len(request.past):
            return []
        # A fork may need a last page, and one more stays free for it as in `_allocate`.
        pages_per_fork = int(needs_page) + 1
        max_by_pages = (self._pool.num_available - len(self._running) + 1) // pages_per_fork
        max_siblings = min(max_by_pages, self._table.num_free - num_kept)
        siblings: list[Request] = []
        while len(siblings) < max_siblings and self._waiting:
            if not _are_siblings(self._waiting.first, request):
                break
            siblings.append(self._waiting.popleft())
        return siblings


def _are_siblings(request: Request, first: Request) -> bool:
    """Return whether `request` is a fresh sample of `first`'s prompt, with the same sampling."""
    same = request.prompt is first.prompt and request.sampling is first.sampling
    return same and not len(request.past)
