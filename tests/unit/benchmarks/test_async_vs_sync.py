"""Table of the benchmark of asynchronous runs: each bar holds, and is missed where it should be."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.async_vs_sync import (
    LONG_TOKENS,
    MAX_LAG,
    NUM_SAMPLES,
    NUM_STEPS,
    PROMPTS_PER_STEP,
    SHORT_TOKENS,
    Measured,
    rows_of,
    texts,
)

NUM_LONG = NUM_STEPS * NUM_SAMPLES
SYNC = Measured(
    10.0,
    [0.0] * NUM_STEPS,
    [SHORT_TOKENS] * NUM_LONG * (PROMPTS_PER_STEP - 1),
    [LONG_TOKENS] * NUM_LONG,
)
ASYNC = replace(SYNC, seconds=6.9, lags=[0.0, 1.0, float(MAX_LAG)])


def missed(*asynchronous: Measured) -> list[str]:
    return [row.what for row in rows_of([SYNC], list(asynchronous)) if row.holds is False]


def test_a_run_within_all_bars() -> None:
    rows = rows_of([SYNC], [ASYNC])
    assert missed(ASYNC) == []
    assert rows[0].ratio == 0.69
    assert [row.value for row in rows[2:]] == [MAX_LAG, 30, 2]


def test_every_bar_can_be_missed() -> None:
    assert len(missed(replace(ASYNC, seconds=7.1))) == 1
    assert missed(replace(ASYNC, lags=[MAX_LAG + 1.0])) == ["age of the oldest token"]
    assert missed(replace(ASYNC, long=[LONG_TOKENS] * (NUM_LONG - 1))) == ["runs with all samples"]
    shorter = [*([LONG_TOKENS] * (NUM_LONG // 2)), *([SHORT_TOKENS] * (NUM_LONG // 2))]
    assert missed(replace(ASYNC, long=shorter)) == ["long answers beside short ones"]


def test_one_prompt_of_each_step_is_long() -> None:
    kinds = [text[0] for text in texts(2 * PROMPTS_PER_STEP)]
    assert kinds == ["l", *"s" * (PROMPTS_PER_STEP - 1)] * 2
