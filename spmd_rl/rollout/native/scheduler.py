"""Scheduler of the native engine: it decides which tokens the next step computes.

One rule covers decoding, chunks of prompts, and recomputation after a preemption. A running row has
`length` tokens, of which `num_computed` have K/V in the cache; steps compute the rest. Rows that
miss one token (decoding) go first. The other rows share what is left of the token budget, in the
order of admission. New admissions get the remainder (`admission.py`). When pages run out, the
newest row is preempted: it goes to the front of the queue with its tokens, and computes their K/V
again later.

An engine that launches recorded decoding steps ahead sets `separate_prefill`. Then a step is either
all prefill or all decoding, and prompts wait until some rows are free. Prefill steps go first, but
`prefill_bound` limits what they do between two decoding steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.admission import Admission
from spmd_rl.rollout.native.counters import SchedulerCounters
from spmd_rl.rollout.native.pages import PagePool, StateSnapshots
from spmd_rl.rollout.native.prefix_sharing import PrefixSharing
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_budget import PrefillBound, StepBudget, share_budget
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.rollout.waiting_queue import WaitingQueue

REFILL_SHARE = 16  # a separate prefill step runs once one row in this many is free


class Scheduler:
    """Moves requests between the queue and the table, and pages between the pool and the rows."""

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        *,
        max_step_tokens: int,
        prefix_cache: bool,
        eos_ids: tuple[int, ...] = (),
        separate_prefill: bool = False,
        prefill_bound: PrefillBound | None = None,
        min_tail: int = 16,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """With `snapshots`, layers of the model hand states on."""
        self.table = table
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.separate_prefill = separate_prefill
        self.waiting = WaitingQueue()
        self.running: list[int] = []
        self.counters = SchedulerCounters()
        self._prefill_bound = prefill_bound or PrefillBound()
        self._prefixes = PrefixSharing(
            table, pool, min_tail=min_tail, enabled=prefix_cache, snapshots=snapshots
        )
        self._admission = Admission(
            self.waiting,
            self.running,
            table,
            pool,
            self._prefixes,
            self.counters,
            eos_ids=eos_ids,
            separate_prefill=separate_prefill,
            forks=prefix_cache and not separate_prefill and snapshots is None,
        )

    def add(self, request: Request) -> None:
        self.counters.num_submitted += 1
        self.waiting.append(request)

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return len(self.running), len(self.waiting)

    def stats(self) -> dict[str, int]:
        """Return what runs and waits now, and counts since the start."""
        num_running, num_waiting = self.load
        return {
            "num_running": num_running,
            "num_waiting": num_waiting,
            "num_evictions": self.pool.num_evictions,
            **asdict(self.counters),
        }

    def schedule(self) -> StepPlan:
        """Return the plan of the next step.

        It is empty only if nothing can be computed before the tokens of steps in flight arrive.
        """
        self._append_pages()
        rows = self._unfinished_rows()
        if self.separate_prefill:
            plan = self._plan_apart(rows)
        else:
            plan = self._plan(rows, StepBudget(self.max_step_tokens), admit=True)
        plan = replace(plan, states_after=self._prefixes.take_snapshots(plan))
        self.counters.num_scheduled_tokens += int(plan.lengths.sum())
        if self.waiting:
            self.counters.add_backlog(len(self.running))
        return plan

    def take_admitted(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Return (uid, index) of what was admitted since the last call, and what was cached."""
        if not self._admission.admitted:
            return [], []
        rows, cached = map(list, zip(*self._admission.admitted, strict=True))
        self._admission.admitted = []
        keys = self.table.uid[rows].tolist(), self.table.index[rows].tolist()
        return [*zip(*keys, strict=True)], cached

    def rows_to_sample(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Return which rows of `plan` reach their last token, and so sample the next one.

        Shape: returns [B].
        """
        return plan.starts + plan.lengths == self.table.length[plan.rows]

    def mark_computed(self, plan: StepPlan) -> None:
        """Record that the K/V of `plan` are in the cache, or will be for every later step."""
        self.table.num_computed[plan.rows] = plan.starts + plan.lengths
        self._prefixes.publish_tails(plan.rows)

    def remove(self, rows: list[int]) -> list[Request]:
        """Take `rows` out of the batch, and return the requests that would resume them."""
        removed = set(rows)
        self.running[:] = [row for row in self.running if row not in removed]
        for row, pages in zip(rows, self.table.page_lists(rows), strict=True):
            self.pool.release(pages)
            self._prefixes.remove_row(row)
        return self.table.remove(rows)

    def abort(self, uid: int | None, index: int | None) -> list[Request]:
        """Remove and return the requests of `uid` and `index`; None matches every one."""

        def matches(request: Request | None) -> bool:
            return (
                request is not None
                and uid in (None, request.uid)
                and index in (None, request.index)
            )

        rows = [row for row in self.running if matches(self.table.requests[row])]
        aborted = self.remove(rows)
        kept: list[Request] = []
        for request in self.waiting:
            (aborted if matches(request) else kept).append(request)
        self.waiting.replace(kept)
        self.counters.num_aborts += len(aborted)
        return aborted

    def requests(self) -> list[Request]:
        """Return all requests, each with the answer that the host has of it."""
        return [*self.table.answered(self.running), *self.waiting]

    def retract_all(self) -> None:
        """Return every running request to the front of the queue, the oldest first."""
        self.counters.num_retractions += len(self.running)
        self.waiting.extendleft(reversed(self.remove(list(self.running))))

    def discard_kv(self, version: int) -> None:
        """Retract all rows and forget all K/V; what comes next is computed by weights `version`."""
        self.retract_all()
        self.pool.forget_prefixes()
        self._prefixes.begin_version(version)

    def _unfinished_rows(self) -> NDArray[np.int64]:
        """Return the running rows, except those whose last token is in flight."""
        rows = np.array(self.running, dtype=np.int64)
        return rows[self.table.length[rows] < self.table.max_length[rows]]

    def _num_missing(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each of `rows` have no K/V yet."""
        return self.table.length[rows] - self.table.num_computed[rows]

    def _refill_due(self) -> bool:
        """Return whether decoding should wait for a prefill step.

        It should if enough rows are free, or if samples of a prompt just computed wait for a row.
        """
        enough_free = self.table.num_free * REFILL_SHARE >= self.table.num_rows
        return self._admission.num_delayed > 0 or enough_free

    def _plan_apart(self, rows: NDArray[np.int64]) -> StepPlan:
        """Return a step of prompts, or of decoding if no prompt is due or it is decoding's turn."""
        prefills = self._num_missing(rows) > 1
        budget = self._prefill_bound.budget(
            self.max_step_tokens, holds_up_decoding=not prefills.all()
        )
        copies_before: Sequence[tuple[int, int]] = ()
        states_before: Sequence[tuple[int, int]] = ()
        if budget.num_tokens:
            plan = self._plan(rows[prefills], budget, admit=self._refill_due())
            if len(plan.rows):
                self._prefill_bound.add_prefill(budget)
                return plan
            copies_before, states_before = plan.copies_before, plan.states_before
            rows = self._unfinished_rows()
        self._prefill_bound.add_decoding()
        decoding = rows[self._num_missing(rows) == 1]
        plan = self._plan(decoding, StepBudget(self.max_step_tokens), admit=False)
        return replace(plan, copies_before=copies_before, states_before=states_before)

    def _plan(self, rows: NDArray[np.int64], budget: StepBudget, *, admit: bool) -> StepPlan:
        """Spread `budget` over the missing tokens of `rows`, then over admissions."""
        starts, missing = self.table.num_computed[rows], self._num_missing(rows)
        self._prefixes.cut_at_stops(rows, starts, missing)
        lengths = share_budget(starts, missing, budget)
        busy = lengths > 0
        plan = StepPlan(rows[busy], starts[busy], lengths[busy])
        self._prefixes.publish_filled_pages(plan)
        self.counters.num_partial_chunks += int((plan.lengths < missing[busy]).sum())
        if not admit:
            return plan
        return self._admission.extend(plan, budget)

    def _append_pages(self) -> None:
        """Give each running row the page of its newest token.

        While no page is available, the newest row is preempted.
        """
        rows = self._unfinished_rows()
        full = self.table.length[rows] > self.table.num_pages[rows] * self.table.page_size
        for row in rows[full].tolist():
            while not self.pool.num_available and self.table.requests[row]:
                self.counters.num_preemptions += 1
                self.waiting.extendleft(self.remove(self.running[-1:]))
            if not self.table.requests[row]:
                return
            self.table.append_page(row, self.pool.allocate())
