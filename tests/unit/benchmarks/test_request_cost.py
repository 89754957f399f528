"""What the benchmark of single requests makes of its readings."""

from __future__ import annotations

import pytest

from benchmarks.request_cost import Found, growth_mib, rows_of
from benchmarks.request_recipe import Reading, Usage, new_prompts, usage

MIB = 1 << 20


def readings(rank_mib: list[int], cost_s: float = 1e-4) -> list[Reading]:
    """Return a reading every 10,000 requests, at so many MiB of the only rank."""
    return [
        Reading(
            10_000 * number,
            4.0 * number,
            Usage(3.0 + 10_000 * number * cost_s, 40 * MIB),
            [Usage(0.0, size * MIB)],
        )
        for number, size in enumerate(rank_mib)
    ]


def bars(found: Found) -> list[bool | None]:
    return [row.holds for row in rows_of(found) if row.bar is not None]


@pytest.mark.parametrize(
    ("rank_mib", "cost_s", "left", "held"),
    [
        ([100, 150, 160, 160, 161, 162, 160, 163, 161], 1e-4, 0, [True, True, True, True]),
        ([100, 150, 160, 170, 180, 190, 200, 210, 220], 1e-4, 0, [True, True, False, True]),
        ([100, 150, 160, 160, 161, 162, 160, 163, 161], 4e-4, 1, [False, True, True, False]),
    ],
)
def test_bars(rank_mib: list[int], cost_s: float, left: int, held: list[bool]) -> None:
    found = Found(readings(rank_mib, cost_s), {"calls": left, "groups": 0})
    assert bars(found) == held
    cost = next(iter(rows_of(found)))
    assert (cost.value, cost.unit) == (pytest.approx(1e3 * cost_s), "ms")


def test_a_short_run_says_nothing_of_growth() -> None:
    assert bars(Found(readings([100, 150, 160]), {})) == [True, True]


def test_growth_is_that_of_medians() -> None:
    assert growth_mib([10 * MIB, 30 * MIB, 11 * MIB, 50 * MIB, 13 * MIB, 12 * MIB, 90 * MIB]) == 2


def test_prompts_are_all_different_and_usage_is_read() -> None:
    prompts = [prompt for prompt, _ in zip(new_prompts(24), range(2500), strict=False)]
    assert [prompt.uid for prompt in prompts] == list(range(2500))
    assert len({prompt.tokens.tobytes() for prompt in prompts}) == 2500
    assert usage().memory_bytes > MIB
