"""Interleaved timing: the order of turns, and the times that count."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.kernels.runtime import interleaved_timing


@given(count=st.integers(1, 12), num_turns=st.integers(0, 20))
def test_all_come_once_a_turn(count: int, num_turns: int) -> None:
    found = list(interleaved_timing.shuffled_turns(count, num_turns))
    assert [turn for turn, _ in found] == [turn for turn in range(num_turns) for _ in range(count)]
    for turn in range(num_turns):
        assert sorted(index for own, index in found if own == turn) == list(range(count))
    assert found == list(interleaved_timing.shuffled_turns(count, num_turns))


def test_each_comes_after_each_other() -> None:
    indices = [index for _, index in interleaved_timing.shuffled_turns(4, 41)]
    after = {(a, b) for a, b in pairwise(indices) if a != b}
    assert len(after) == 4 * 3


def test_the_median_of_the_turns_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock: the first turn of each is slow, and so is one in five later."""
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Work:
        def __init__(self, milliseconds: float) -> None:
            self.milliseconds, self.calls = milliseconds, 0

        def __call__(self) -> None:
            nonlocal now
            now += 1000 if self.calls % 5 == 0 else self.milliseconds
            self.calls += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    works = [Work(2), Work(3)]
    assert interleaved_timing.seconds(works, turns=9, warm_up=1) == pytest.approx([2e-3, 3e-3])
    assert [work.calls for work in works] == [10, 10]
    assert interleaved_timing.seconds([Work(2)], turns=1, warm_up=0) == [1.0]
