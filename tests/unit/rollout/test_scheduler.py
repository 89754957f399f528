"""The scheduler, against a cache that keeps the whole token history of each slot's K/V."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.pages import PagePool
from spmd_rl.rollout.native.prefill_cost import PrefillCost, StepWork
from spmd_rl.rollout.native.scheduler import REFILL_SHARE, Scheduler
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_budget import PrefillBound
from spmd_rl.rollout.native.step_plan import StepPlan

MAX_TOKENS = 40
COST = PrefillCost(token_s=1.0, key_s=0.1, tile_tokens=2, wave_tokens=4)
FEATURES = (
    "num_preemptions",
    "num_retractions",
    "num_aborts",
    "num_partial_chunks",
    "num_hit_tokens",
    "num_copied_tails",
    "num_forks",
    "num_evictions",
    "num_late",
    "num_turns",
)


class FakeRunner:
    """Runs plans and checks what the real kernels rely on.

    With `ahead`, it collects a step's tokens one step late, and decoding rows wait for `most_s`
    seconds of prefill at most, or for one chunk that fills the GPU. `num_turns` counts the decoding
    steps that prompts waited for.
    """

    def __init__(
        self,
        *,
        max_batch=4,
        page_size=4,
        num_pages=12,
        max_step_tokens=16,
        prefix_cache=True,
        ahead=False,
        min_tail=16,
        most_s=math.inf,
    ) -> None:
        self.table = SequenceTable(max_batch, MAX_TOKENS, page_size)
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            self.table,
            self.pool,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            separate_prefill=ahead,
            prefill_bound=PrefillBound(COST, most_s),
            min_tail=min_tail,
        )
        self.ahead = ahead
        self.most_s = most_s
        self.held_up: list[StepWork] = []
        self.num_turns = 0
        self.slots: dict[int, tuple[int, ...]] = {}
        self.drawn: dict[int, list[int]] = {}
        self.in_flight: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.stops: dict[int, int] = {}
        self.done: dict[int, list[int]] = {}

    def submit(
        self,
        uid: int,
        prompt: list[int],
        max_tokens: int,
        stop_after: int = MAX_TOKENS,
        priority: int = 0,
    ) -> None:
        self.submit_all([uid], prompt, max_tokens, stop_after, priority)

    def submit_all(
        self,
        uids: list[int],
        prompt: list[int],
        max_tokens: int,
        stop_after: int = MAX_TOKENS,
        priority: int = 0,
    ) -> None:
        """Samples of one prompt; each has a uid of its own here, which the tokens drawn for it
        depend on.
        """
        tokens, sampling = np.array(prompt, dtype=np.int32), SamplingConfig(max_tokens=max_tokens)
        for uid in uids:
            self.stops[uid] = stop_after
            self.scheduler.add(Request(uid, 0, tokens, sampling, priority=priority))

    def step(self) -> StepPlan:
        could_decode = self.can_decode()
        plan = self.scheduler.schedule()
        assert plan.lengths.sum() <= self.scheduler.max_step_tokens
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        if self.ahead:
            missing = self.missing(plan.rows)
            assert (missing == 1).all() or (missing > 1).all(), "prompts and decoding share a step"
            # whoever could decode may have been preempted
            self.check_wait(plan, could_decode and self.can_decode())
        self.copy(plan.copies_before)
        work = list(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        )
        written: set[int] = set()
        for row, start, length in work:
            for position in range(start, start + length):
                slot = self.slot(row, position)
                assert slot not in written, "two rows write one slot in one step"
                written.add(slot)
                self.slots[slot] = self.history(row, position)
        self.copy(plan.copies_after)
        for (leader, *_), (row, _, length) in pairwise(work):
            assert length or self.sequence(row) == self.sequence(leader), (
                "a row draws from another's logits"
            )
        for row, start, length in work:
            for position in range(start + length):
                assert self.slots[self.slot(row, position)] == self.history(row, position), (
                    "a row reads another's K/V"
                )
        ready = plan.rows[self.scheduler.rows_to_sample(plan)]
        self.scheduler.mark_computed(plan)
        self.check_pages()
        tokens = self.table.uid[ready] + self.table.length[ready]
        for row, token in zip(ready.tolist(), tokens.tolist(), strict=True):
            self.sequence(row).append(token)
        self.table.add_pending(ready)
        self.in_flight.append((ready, self.table.sequence_id[ready], tokens))
        while len(self.in_flight) > self.ahead:
            self.collect(*self.in_flight.pop(0))
        return plan

    def unfinished(self) -> np.ndarray:
        rows = np.array(self.scheduler.running, dtype=np.int64)
        return rows[self.table.length[rows] < self.table.max_length[rows]]

    def can_decode(self) -> bool:
        return bool((self.missing(self.unfinished()) == 1).any())

    def missing(self, rows: np.ndarray) -> np.ndarray:
        return self.table.length[rows] - self.table.num_computed[rows]

    def check_wait(self, plan: StepPlan, can_decode: bool) -> None:
        """The prefill steps since the last decoding step fit the bound, or are one least chunk."""
        decodes = len(plan.rows) > 0 and (self.missing(plan.rows) == 1).all()
        if decodes:
            self.num_turns += bool((self.missing(self.unfinished()) > 1).any())
        if decodes or not can_decode:
            self.held_up = []
            return
        work = StepWork()
        for start, length in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            work = COST.add(work, start, length)
        self.held_up.append(work)
        chunks = plan.lengths[plan.lengths > 0]  # other rows draw from the logits of one of these
        is_least_chunk = len(self.held_up) == len(chunks) == 1 and chunks[0] <= COST.wave_tokens
        seconds = sum(step.seconds for step in self.held_up)
        assert is_least_chunk or seconds <= self.most_s, "decoding waits for too much prefill"

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        before, size = dict(self.slots), self.table.page_size
        assert len({target for _, target in pages}) == len(pages)
        for source, target in pages:
            for offset in range(size):
                self.slots.pop(target * size + offset, None)
                if source * size + offset in before:
                    self.slots[target * size + offset] = before[source * size + offset]

    def collect(self, rows: np.ndarray, sequence_ids: np.ndarray, tokens: np.ndarray) -> None:
        stayed = self.table.sequence_id[rows] == sequence_ids
        rows, tokens = rows[stayed], tokens[stayed]
        self.table.write_sampled(rows, tokens, np.zeros(len(rows), np.float32), 0)
        for row in rows.tolist():
            num_drawn = self.table.host_length(row) - self.table.prompt_length[row]
            if (
                self.table.host_length(row) == self.table.max_length[row]
                or num_drawn == self.stops[int(self.table.uid[row])]
            ):
                (request,) = self.scheduler.remove([row])
                self.done[request.uid] = request.past.tokens.tolist()

    def sequence(self, row: int) -> list[int]:
        """All tokens of the row's present sequence, promised ones too."""
        known = self.table.tokens[row, : self.table.length[row]]
        return self.drawn.setdefault(int(self.table.sequence_id[row]), known.tolist())

    def slot(self, row: int, position: int) -> int:
        page_size = self.table.page_size
        assert position // page_size < self.table.num_pages[row]
        return int(self.table.pages[row, position // page_size]) * page_size + position % page_size

    def history(self, row: int, position: int) -> tuple[int, ...]:
        return tuple(self.sequence(row)[: position + 1])

    def check_pages(self) -> None:
        """No page is lost, and none is shared that somebody may still write to."""
        holders = Counter(
            page for row in self.scheduler.running for page in self.table.page_list(row)
        )
        assert self.pool.num_available == self.pool.num_pages - len(holders)
        for row in self.scheduler.running:
            for order, page in enumerate(self.table.page_list(row)):
                full = (order + 1) * self.table.page_size <= self.table.num_computed[row]
                assert full or holders[page] == 1, "a page is shared while it can be written"

    def run(self) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            assert len(self.step().rows) or self.in_flight, (
                "a step did nothing although work is left"
            )


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def test_requests_that_are_retracted_go_on_in_the_order_they_came():
    runner = FakeRunner(max_batch=3)
    for uid in range(5):
        runner.submit(uid, [uid], max_tokens=6)
    runner.step()
    assert [one.uid for one in runner.scheduler.waiting] == [3, 4]
    runner.scheduler.retract_all()
    assert [one.uid for one in runner.scheduler.waiting] == [0, 1, 2, 3, 4]


def test_a_lower_priority_number_is_admitted_first():
    runner = FakeRunner(max_batch=2)
    for uid, priority in enumerate([2, 1, 2, 0, 1, 0]):
        runner.submit(uid, [uid], max_tokens=6, priority=priority)
    assert [one.uid for one in runner.scheduler.waiting] == [3, 5, 1, 4, 0, 2]
    runner.step()
    assert [runner.table.uid[row] for row in runner.scheduler.running] == [3, 5]
    assert [one.uid for one in runner.scheduler.waiting] == [1, 4, 0, 2]
    runner.submit(6, [6], max_tokens=6, priority=0)
    runner.scheduler.retract_all()
    assert [one.uid for one in runner.scheduler.waiting] == [3, 5, 6, 1, 4, 0, 2]
    runner.scheduler.abort(4, None)
    assert [one.uid for one in runner.scheduler.waiting] == [3, 5, 6, 1, 0, 2]
    runner.run()


def test_any_load_finishes_with_every_page_back():
    seen: Counter[str] = Counter()

    @settings(max_examples=75)
    @example(
        requests=[([0] * 5, 3, 3)], num_samples=3, max_batch=6, page_size=4, spare_pages=10,
        spare_tokens=12, prefix_cache=True, ahead=False, min_tail=16, most_s=5.0, moves=[],
    )  # fmt: skip
    @example(
        requests=[([0] * 5, 3, 3)], num_samples=3, max_batch=3, page_size=8, spare_pages=10,
        spare_tokens=0, prefix_cache=True, ahead=False, min_tail=3, most_s=5.0, moves=[],
    )  # fmt: skip
    @example(
        requests=[([0, 1] * 9, 19, 19)] * 4, num_samples=2, max_batch=6, page_size=4,
        spare_pages=2, spare_tokens=6, prefix_cache=True, ahead=True, min_tail=3, most_s=15.0,
        moves=["step", "step", "retract", "step", "abort"],
    )  # fmt: skip
    @given(
        requests=st.lists(
            st.tuples(prompts, st.integers(1, 19), st.integers(1, 19)), min_size=1, max_size=10
        ),
        num_samples=st.integers(1, 3),
        max_batch=st.integers(1, 6),
        page_size=st.sampled_from([1, 2, 4, 8]),
        spare_pages=st.integers(0, 10),
        spare_tokens=st.integers(0, 12),
        prefix_cache=st.booleans(),
        ahead=st.booleans(),
        min_tail=st.sampled_from([1, 3, 16]),
        most_s=st.sampled_from([0.0, 5.0, 15.0, math.inf]),
        moves=st.lists(st.sampled_from(["step", "retract", "abort"]), max_size=12),
    )
    def check(
        requests, num_samples, max_batch, page_size, spare_pages, spare_tokens, moves, **options
    ):
        runner = FakeRunner(
            max_batch=max_batch,
            page_size=page_size,
            num_pages=-(-MAX_TOKENS // page_size) + spare_pages,
            max_step_tokens=max_batch + spare_tokens,
            **options,
        )
        for number, (prompt, max_tokens, stop_after) in enumerate(requests):
            uids = list(range(number * num_samples, (number + 1) * num_samples))
            runner.submit_all(uids, prompt, max_tokens, stop_after)
        for move in moves:
            if move == "step":
                runner.step()
            elif move == "retract":
                runner.scheduler.discard_kv(version=0)
            else:
                for request in runner.scheduler.abort(uid=0, index=None):
                    runner.scheduler.add(request)
            runner.check_pages()
        runner.run()
        assert runner.pool.num_available == runner.pool.num_pages
        for uid in range(len(requests) * num_samples):
            prompt, max_tokens, stop_after = requests[uid // num_samples]
            assert runner.done[uid] == [
                uid + len(prompt) + i for i in range(min(max_tokens, stop_after))
            ]
        seen.update(vars(runner.scheduler.counters))
        seen["num_evictions"] += runner.pool.num_evictions
        seen["num_late"] += runner.ahead and len(runner.drawn) > 0
        seen["num_turns"] += runner.num_turns

    check()
    assert all(seen[feature] for feature in FEATURES), f"a feature was not exercised: {seen}"


def test_preemption_takes_the_newest_and_puts_it_back_in_front_with_its_tokens():
    runner = FakeRunner(
        max_batch=4, page_size=4, num_pages=10, max_step_tokens=64, prefix_cache=False
    )
    for uid in range(3):
        runner.submit(uid, [uid] * 6, max_tokens=20)
    runner.submit(3, [3] * 6, max_tokens=20)
    while not runner.scheduler.counters.num_preemptions:
        runner.step()
    running = [int(runner.table.uid[row]) for row in runner.scheduler.running]
    waiting = [request.uid for request in runner.scheduler.waiting]
    assert running + waiting == [0, 1, 2, 3], "the order of arrival is kept"
    assert len(runner.scheduler.waiting.first.past) > 0
    runner.run()
    assert runner.done[2] == [2 + 6 + i for i in range(20)]


def test_samples_of_one_prompt_share_its_full_pages_from_the_first_step():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64)
    for uid in range(4):
        runner.submit(uid, list(range(10)), max_tokens=2)
    plan = runner.step()
    assert plan.starts.tolist() == [0, 8, 8, 8]
    assert plan.lengths.tolist() == [10, 2, 2, 2]
    assert runner.scheduler.counters.num_hit_tokens == 24


def test_prompts_wait_for_some_free_rows_where_decoding_is_recorded():
    runner = FakeRunner(max_batch=32, page_size=4, num_pages=400, max_step_tokens=400, ahead=True)
    for uid in range(32):
        runner.submit(uid, [uid] * 3, max_tokens=30, stop_after=2 + (uid != 0) + 2 * (uid > 1))
    for uid in range(32, 40):
        runner.submit(uid, [uid] * 3, max_tokens=30)
    sizes = [len(runner.step().rows) for _ in range(6)]
    assert sizes == [32, 32, 32, 31, 2, 32], "one free row of 32 waits, two are filled"


def test_the_batch_stays_full_while_prompts_wait():
    runner = FakeRunner(max_batch=32, page_size=4, num_pages=400, max_step_tokens=400, ahead=True)
    for uid in range(200):
        runner.submit(uid, [uid] * 3, max_tokens=30, stop_after=5 + uid * 7 % 25)
    while runner.scheduler.waiting:
        runner.step()
    counted = runner.scheduler.counters
    assert counted.num_backlog_steps > 50
    assert counted.num_backlog_rows > (1 - 1 / REFILL_SHARE) * 32 * counted.num_backlog_steps
    before = counted.num_backlog_steps
    runner.run()
    assert counted.num_backlog_steps == before, "nothing waits any more"


def test_samples_of_one_prompt_copy_its_tail_and_compute_one_token():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64, min_tail=1)
    for uid in range(4):
        runner.submit(uid, list(range(11)), max_tokens=3)
    runner.submit(4, [9] * 5, max_tokens=3)
    first, second = runner.step(), runner.step()
    assert (first.starts.tolist(), first.lengths.tolist()) == ([0, 0], [11, 5]), (
        "others do not wait for the group"
    )
    assert (second.starts.tolist(), second.lengths.tolist()) == ([11, 5, 10, 10, 10], [1] * 5)
    assert len(second.copies_before) == 3
    runner.run()
    assert runner.done[3] == [3 + 11 + i for i in range(3)]


@pytest.mark.parametrize(
    ("num_tokens", "first", "second"),
    [
        (16, [16] * 3, [1] * 3),
        (17, [17], [1] * 3),
        (32, [32], [1] * 3),
        (37, [37, 5, 5], [1] * 3),
    ],
)
def test_only_a_short_tail_is_computed_by_each(
    num_tokens: int, first: list[int], second: list[int]
):
    """Nobody waits for fewer than 16 tokens where steps are recorded; pages are of 32 here."""
    runner = FakeRunner(max_batch=8, page_size=32, num_pages=64, max_step_tokens=200, ahead=True)
    runner.submit_all([0, 1, 2], list(range(num_tokens)), max_tokens=3)
    assert [runner.step().lengths.tolist() for _ in range(2)] == [first, second]
    runner.run()
    assert runner.done[2] == [2 + num_tokens + i for i in range(3)]


def test_samples_of_one_prompt_fork_from_the_row_that_computes_it():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64)
    runner.submit_all([0, 1, 2], list(range(7)), max_tokens=3)
    runner.submit_all([3, 4], list(range(8)), max_tokens=3)
    plan = runner.step()
    assert plan.starts.tolist() == [0, 7, 7, 4, 8]
    assert plan.lengths.tolist() == [7, 0, 0, 4, 0]
    assert len(plan.copies_after) == 2, "a full last page is shared, not copied"
    assert (
        runner.table.pages[plan.rows[3], :2].tolist()
        == runner.table.pages[plan.rows[4], :2].tolist()
    )
    runner.run()
    assert runner.done[2] == [2 + 7 + i for i in range(3)]


def test_nobody_forks_from_a_prompt_that_is_not_computed_to_its_end():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=8)
    runner.submit_all([0, 1], list(range(10)), max_tokens=1)
    assert [runner.step().lengths.tolist() for _ in range(2)] == [[8], [2, 2]]
    runner.run()
    assert not runner.scheduler.counters.num_forks


def test_a_tail_is_not_copied_from_a_page_that_was_given_back():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64, min_tail=1)
    runner.submit(0, list(range(7)), max_tokens=1)
    runner.run()
    runner.submit(1, list(range(7)), max_tokens=1)
    plan = runner.step()
    assert (plan.starts.tolist(), list(plan.copies_before)) == ([4], [])


def test_a_tail_on_the_last_page_of_the_pool_does_not_keep_a_prompt_out():
    runner = FakeRunner(max_batch=2, page_size=4, num_pages=2, min_tail=1)
    for uid in range(2):
        runner.submit(uid, list(range(7)), max_tokens=2)
        runner.run()
    assert runner.done == {0: [7, 8], 1: [8, 9]}


def test_a_whole_prompt_in_the_cache_still_computes_its_last_page():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64)
    runner.submit(0, list(range(8)), max_tokens=1)
    runner.run()
    runner.submit(1, list(range(8)), max_tokens=1)
    plan = runner.step()
    assert (plan.starts.tolist(), plan.lengths.tolist()) == ([4], [4])


def test_no_cached_page_survives_a_new_version():
    runner = FakeRunner(max_batch=8, page_size=4, num_pages=64, max_step_tokens=64)
    runner.submit(0, list(range(8)), max_tokens=1)
    runner.run()
    runner.scheduler.discard_kv(version=1)
    runner.submit(1, list(range(8)), max_tokens=1)
    assert runner.step().starts.tolist() == [0]


def test_a_long_prompt_does_not_hold_up_decoding():
    runner = FakeRunner(max_batch=4, page_size=4, num_pages=64, max_step_tokens=8)
    runner.submit(0, [0], max_tokens=12)
    runner.step()
    runner.submit(1, [1] * 20, max_tokens=2)
    assert [runner.step().lengths.tolist() for _ in range(3)] == [[1, 7], [1, 7], [1, 6]]
    assert runner.scheduler.counters.num_partial_chunks == 2
