"""Who computes which tokens in the next step.

One rule covers decoding, chunks of prompts, and recomputation after a preemption: a running row has
`length` tokens, of which `computed` have K/V, and the step works off the difference. Rows that miss
one token (decoding) go first; what is left of the token budget goes to the others in the order of
admission, then to admissions. When pages run out, the newest row is preempted: it goes to the front
of the queue with its tokens and later computes their K/V again.

The samples of one prompt compute it once. Those that are admitted in the step that computes it to
the end fork from it: they share its full pages, get a copy of the last one after the step, and draw
from the same logits. Others share full pages; for a long tail on the last one they wait, rows kept
for them, until it can be copied, and compute one token.

An engine that replays a recorded decoding step, and launches it before the last one's tokens are
known, keeps the two kinds `apart`: a step is all prompts or all rows that miss one token, and
prompts wait until some rows are free. Nobody forks there: the recorded step computes a last token
for less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.pages import PagePool, extend_keys
from spmd_rl.rollout.native.prefix_sharing import PrefixSharing, SharedPrefix
from spmd_rl.rollout.native.sequence_table import SHARED_PAGE, Fork, SequenceTable
from spmd_rl.rollout.native.step_plan import Counters, StepPlan, share_budget

REFILL_SHARE = 16  # prompts go in once one row in so many is free


class Scheduler:
    """Moves requests between the queue and the rows, and pages between the pool and the rows."""

    def __init__(
        self,
        rows: SequenceTable,
        pool: PagePool,
        *,
        max_step_tokens: int,
        prefix_cache: bool,
        eos_ids: tuple[int, ...] = (),
        apart: bool = False,
        min_tail: int = 16,
    ) -> None:
        self.rows = rows
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.prefix_cache = prefix_cache
        self.eos_ids = eos_ids
        self.apart = apart
        self._forks = prefix_cache and not apart
        self.waiting: deque[Request] = deque()
        self.running: list[int] = []
        self.counters = Counters()
        self._stems = PrefixSharing(pool, rows.page_size, min_tail=min_tail, enabled=prefix_cache)
        self._keys: dict[int, list[bytes]] = {}
        self._num_later = 0

    def add(self, request: Request) -> None:
        self.counters.num_submitted += 1
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Choose the next step's work. Empty only where nothing is left to do before promised
        tokens come.
        """
        self._append_pages()
        rows = self._unfinished()
        if self.apart:
            plan = self._share(rows[self._missing(rows) > 1], admit=self._refill_due())
            if not len(plan.rows):
                plan = replace(self._share(self._unfinished(), admit=False), copies=plan.copies)
        else:
            plan = self._share(rows, admit=True)
        self.counters.num_scheduled_tokens += int(plan.lengths.sum())
        if self.waiting:
            self.counters.add_backlog(len(self.running))
        return plan

    def _unfinished(self) -> NDArray[np.int64]:
        """The running rows, less those whose last token is promised."""
        rows = np.array(self.running, dtype=np.int64)
        return rows[self.rows.length[rows] < self.rows.limit[rows]]

    def _missing(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of each of `rows` have no K/V yet."""
        return self.rows.length[rows] - self.rows.computed[rows]

    def _refill_due(self) -> bool:
        """Whether enough rows are free, or kept for samples of a prompt just computed, to make
        decoding wait.
        """
        return self._num_later > 0 or self.rows.num_free * REFILL_SHARE >= self.rows.num_rows

    def _share(self, rows: NDArray[np.int64], admit: bool) -> StepPlan:
        """Spread the token budget over what `rows` miss, then over admissions."""
        starts, missing = self.rows.computed[rows], self._missing(rows)
        lengths = share_budget(missing, self.max_step_tokens)
        busy = lengths > 0
        plan = StepPlan(rows[busy], starts[busy], lengths[busy])
        self._publish(plan)
        self.counters.num_partial_chunks += int((plan.lengths < missing[busy]).sum())
        return self._admit(plan, self.max_step_tokens - int(lengths.sum())) if admit else plan

    def ready(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Which rows of `plan` get their next token from it."""
        return plan.starts + plan.lengths == self.rows.length[plan.rows]

    def computed(self, plan: StepPlan) -> None:
        """The K/V that `plan` asked for are in the cache."""
        self.rows.computed[plan.rows] = plan.starts + plan.lengths
        self._stems.publish(plan.rows, self.rows.computed[plan.rows], self.rows.pages)

    def leave(self, rows: list[int]) -> list[Request]:
        """Take `rows` out of the batch, their pages back to the pool."""
        left = set(rows)
        self.running = [row for row in self.running if row not in left]
        for row, pages in zip(rows, self.rows.held_by(rows), strict=True):
            self.pool.release(pages)
            del self._keys[row]
            self._stems.leave(row)
        return self.rows.take(rows)

    def abort(self, uid: int | None, index: int | None) -> list[Request]:
        def matches(request: Request | None) -> bool:
            return (
                request is not None
                and uid in (None, request.uid)
                and index in (None, request.index)
            )

        left = self.leave([row for row in self.running if matches(self.rows.requests[row])])
        left += [request for request in self.waiting if matches(request)]
        self.waiting = deque(request for request in self.waiting if not matches(request))
        self.counters.num_aborts += len(left)
        return left

    def retract_all(self) -> None:
        """Back to the queue with every running request, oldest first."""
        self.counters.num_retractions += len(self.running)
        self.waiting.extendleft(reversed(self.leave(self.running)))

    def forget(self, version: int) -> None:
        """No K/V made so far may be read again; what comes next is of weights `version`."""
        self.retract_all()
        self.pool.flush()
        self._stems.new_version(version)

    def _append_pages(self) -> None:
        """Give each running row the page that its newest token needs; where none is left, preempt
        the newest rows.
        """
        rows = self._unfinished()
        full = self.rows.length[rows] > self.rows.num_pages[rows] * self.rows.page_size
        for row in rows[full].tolist():
            while not self.pool.num_available and self.rows.requests[row]:
                self.counters.num_preemptions += 1
                self.waiting.extendleft(self.leave(self.running[-1:]))
            if not self.rows.requests[row]:
                return
            self.rows.append_page(row, self.pool.allocate())

    def _admit(self, plan: StepPlan, budget: int) -> StepPlan:
        rows, starts, lengths = [], [], []
        copies: list[tuple[int, int]] = []
        forks: list[Fork] = []
        later: list[Request] = []
        while self.waiting and self.rows.num_free > len(later):
            request = self.waiting.popleft()
            stem = self._stems.of(request)
            if budget > 0 and self._stems.is_under_way(stem):
                later.append(request)
                continue
            row = self._place(request, stem, copies) if budget > 0 else None
            if row is None:
                self.waiting.appendleft(request)
                break
            self.running.append(row)
            start, length = int(self.rows.computed[row]), int(self.rows.length[row])
            if self.apart and length - start == 1:
                continue  # it only decodes
            chunk = min(budget, length - start)
            budget -= chunk
            self._publish_pages(row, (start + chunk) // self.rows.page_size)
            followers = (
                self._fork(row, request, len(later), forks) if start + chunk == length else []
            )
            self.counters.num_partial_chunks += start + chunk < length
            rows += [row, *followers]
            starts += [start, *(length for _ in followers)]
            lengths += [chunk, *(0 for _ in followers)]
        self.waiting.extendleft(reversed(later))
        self._num_later = len(later)
        self.rows.put_forks(forks)
        if not rows:
            return replace(plan, copies=copies)
        return StepPlan(
            np.concatenate([plan.rows, np.array(rows)]),
            np.concatenate([plan.starts, np.array(starts)]),
            np.concatenate([plan.lengths, np.array(lengths)]),
            copies,
            [
                (self.rows.last_page(fork.leader), fork.last_page)
                for fork in forks
                if fork.last_page != SHARED_PAGE
            ],
        )

    def _fork(self, leader: int, request: Request, num_kept: int, forks: list[Fork]) -> list[int]:
        """Rows for the samples next in line of the prompt of row `leader`, which this step computes
        to its end.

        As many as there are pages for, and rows besides `num_kept`; none of them has an answer so
        far.
        """
        full, rest = divmod(request.num_tokens, self.rows.page_size)
        # the last page; one more for each running row is left over, as in `_place`
        num_own = int(rest > 0)
        room = (self.pool.num_available - len(self.running) + 1) // (num_own + 1)
        room = (
            min(room, self.rows.num_free - num_kept)
            if self._forks and not len(request.tokens)
            else 0
        )
        same: list[Request] = []
        while len(same) < room and self.waiting and _draws_alike(self.waiting[0], request):
            same.append(self.waiting.popleft())
        if not same:
            return []
        shared = self.rows.held_pages(leader)[:full]
        rows = self.rows.reserve(same)
        for row in rows:
            forks.append(Fork(row, leader, self.pool.allocate() if rest else SHARED_PAGE))
            self.pool.hold(shared)
            self._keys[row] = self._keys[leader].copy()
        self.running += rows
        self.counters.num_forks += len(rows)
        self._count_admissions(len(rows), request.num_tokens, request.num_tokens)
        return rows

    def _place(
        self, request: Request, stem: SharedPrefix, copies: list[tuple[int, int]]
    ) -> int | None:
        """A row with all pages of `request`'s tokens, or None while the pool has too few.

        One page for each running row is left over, lest an admission soon preempts itself.
        """
        page_size = self.rows.page_size
        num_stem, num_needed = request.num_tokens - 1, -(-request.num_tokens // page_size)
        # at least one token is computed, for the logits that the next one is drawn from
        pages = self.pool.match(stem.keys[: num_stem // page_size])
        whole = len(pages) == num_stem // page_size
        tail = self.pool.tail(stem.tail) if whole else None
        held = pages if tail is None else [*pages, tail]
        self.pool.hold(held)
        num_new = num_needed - len(pages)
        # in a pool this small its page is needed itself
        if tail is not None and self.pool.num_available < num_new:
            self.pool.release([tail])
            held, tail = pages, None
        if self.pool.num_available < num_new + len(self.running):
            self.pool.release(held)
            return None
        num_hit = len(pages) * page_size if tail is None else num_stem
        new = [self.pool.allocate() for _ in range(num_new)]
        if tail is not None:
            copies.append((tail, new[0]))
            self.pool.release([tail])
        row = self._put(request, stem, pages + new, computed=num_hit)
        if tail is None:
            self._stems.begin(row, stem, request.num_tokens)
        self.counters.num_copied_tails += tail is not None
        return row

    def _put(self, request: Request, stem: SharedPrefix, pages: list[int], computed: int) -> int:
        stop_ids = request.sampling.stop_ids + (() if request.sampling.ignore_eos else self.eos_ids)
        row = self.rows.put(request, pages, computed=computed, stop_ids=stop_ids)
        self._keys[row] = stem.keys.copy()
        self._count_admissions(1, request.num_tokens, computed)
        return row

    def _count_admissions(self, num_rows: int, num_tokens: int, num_computed: int) -> None:
        self.counters.num_admissions += num_rows
        self.counters.num_lookup_tokens += num_rows * num_tokens
        self.counters.num_hit_tokens += num_rows * num_computed

    def _publish(self, plan: StepPlan) -> None:
        """Make known the pages that this step fills, as far as their tokens are known."""
        ends = (
            np.minimum(plan.starts + plan.lengths, self.rows.known(plan.rows))
            // self.rows.page_size
        )
        filling = self.rows.published[plan.rows] < ends
        for row, end in zip(plan.rows[filling].tolist(), ends[filling].tolist(), strict=True):
            self._publish_pages(row, end)

    def _publish_pages(self, row: int, end: int) -> None:
        """Make known the pages of `row` up to page `end`, the newest of which this step fills.

        They may be shared from this step on: a layer writes the K/V of all its tokens before any
        token attends.
        """
        begin = int(self.rows.published[row])
        if not self.prefix_cache or begin == end:
            return
        keys = self._keys[row]
        extend_keys(
            keys,
            self._stems.root,
            self.rows.tokens[row, : end * self.rows.page_size],
            self.rows.page_size,
        )
        for page in range(begin, end):
            self.pool.publish(int(self.rows.pages[row, page]), keys[page])
        self.rows.published[row] = end


def _draws_alike(request: Request, first: Request) -> bool:
    """Whether `request` is another sample of the prompt of `first`, drawn in the same way and
    without an answer.
    """
    same = request.prompt is first.prompt and request.sampling is first.sampling
    return same and not len(request.tokens)
