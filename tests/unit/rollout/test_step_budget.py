"""Budgets of steps, and the estimated cost of prefill that they are made of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import write_config
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.native.prefill_cost import (
    ATTENTION_FLOPS_PER_S,
    LINEAR_FLOPS_PER_S,
    QUERY_TILE,
    PrefillCost,
    StepWork,
)
from spmd_rl.rollout.native.step_budget import PrefillBound, StepBudget, share_budget

NUM_PROCESSORS = 132  # of an H100 and of an H200
PROMPT = 60_000
COST = PrefillCost(token_s=1.0, key_s=0.25, tile_tokens=2, wave_tokens=4)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return write_config("0.6B", Path(tmp_path_factory.mktemp("shape")))


@pytest.fixture(scope="module")
def cost(spec: ModelSpec) -> PrefillCost:
    return PrefillCost.of_model(spec, NUM_PROCESSORS)


def chunks_of(cost: PrefillCost, most_s: float) -> list[tuple[int, float]]:
    """Return the chunks of a long prompt that decoding rows wait for, and the time of each."""
    start, chunks = 0, []
    while start < PROMPT:
        budget = StepBudget(8192, cost, most_s, cost.wave_tokens)
        chunk = budget.take(start, PROMPT - start)
        chunks.append((chunk, budget.work.seconds))
        start += chunk
    return chunks


def test_costs_are_those_of_the_shape(cost: PrefillCost) -> None:
    """Of Qwen3-0.6B: its linears are 15.7M a layer, and 16 heads of 128 attend in 28 layers."""
    linears = 28 * (1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    assert cost.token_s * LINEAR_FLOPS_PER_S * NUM_PROCESSORS == pytest.approx(
        2 * linears, rel=1e-3
    )
    per_key = cost.key_s * ATTENTION_FLOPS_PER_S * NUM_PROCESSORS
    assert per_key == pytest.approx(4 * 28 * 16 * 128)
    assert cost.wave_tokens == 1024
    assert 16 * cost.wave_tokens // QUERY_TILE <= NUM_PROCESSORS, "tiles of one wave"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_that_shares_a_model_has_its_share(
    spec: ModelSpec, cost: PrefillCost, tp: int
) -> None:
    """Of the linears and heads. With fewer heads, more tokens fill the GPU."""
    own = PrefillCost.of_model(ModelPart(0, tp).spec(spec), NUM_PROCESSORS)
    assert own.token_s == pytest.approx(cost.token_s / tp, rel=1e-3)
    assert own.key_s == pytest.approx(cost.key_s / tp)
    assert own.wave_tokens >= tp * cost.wave_tokens


def test_a_step_takes_no_less_than_one_tile(cost: PrefillCost) -> None:
    few, wave, two = (cost.add(StepWork(), 50_000, length) for length in (128, 1024, 2048))
    assert few.tile_s > 5 * few.attention_s
    assert wave.seconds - few.seconds < 0.2 * wave.seconds
    assert two.seconds > 1.9 * wave.seconds
    assert cost.add(wave, 50_000, 1024).attention_s == pytest.approx(two.attention_s, rel=0.02)


def test_chunks_of_a_long_prompt_shrink_with_depth_and_keep_the_bound(cost: PrefillCost) -> None:
    chunks = chunks_of(cost, 0.040)
    lengths = [length for length, _ in chunks]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert lengths[0] == 8192
    assert set(lengths[:-1]) == {8192, 5120, 4096, 3072, 2048, 1024}
    assert max(seconds for _, seconds in chunks) <= 0.040
    assert len(chunks) <= 32


def test_without_a_bound_chunks_are_as_long_as_a_step(cost: PrefillCost) -> None:
    lengths = [length for length, _ in chunks_of(cost, math.inf)]
    assert lengths == [8192] * 7 + [PROMPT - 7 * 8192]


def test_a_chunk_that_fills_the_gpu_is_taken_in_any_case(cost: PrefillCost) -> None:
    budget = StepBudget(8192, cost, 0.001, cost.wave_tokens)
    assert budget.take(PROMPT, 5000) == cost.wave_tokens
    assert budget.num_tokens == 0
    assert StepBudget(8192, cost, 0.001).take(PROMPT, 5000) == 0


@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(2, 40)), min_size=1, max_size=5),
    num_tokens=st.integers(1, 60),
    most_s=st.sampled_from([0.0, 7.5, 30.0, 200.0, math.inf]),
    least_tokens=st.sampled_from([0, COST.wave_tokens]),
)
def test_chunks_are_the_largest_that_fit(rows, num_tokens, most_s, least_tokens) -> None:
    budget, work, left, is_first = (
        StepBudget(num_tokens, COST, most_s, least_tokens),
        StepWork(),
        num_tokens,
        True,
    )
    for start, missing in rows:
        chunk = budget.take(start, missing)
        most = min(missing, left)
        allowed = {length for length in range(1, most) if length % COST.wave_tokens == 0} | {most}
        fits = [n for n in allowed if COST.add(work, start, n).seconds <= most_s]
        assert chunk == max(fits, default=min(least_tokens, most) if is_first else 0)
        work = COST.add(work, start, chunk) if chunk else work
        left = left - chunk if chunk == missing else 0
        is_first = False
        assert (budget.work, budget.num_tokens) == (work, left)


def test_prompts_and_decoding_take_turns() -> None:
    bound = PrefillBound(COST, most_s=20.0)

    def prefill(missing: int) -> int:
        budget = bound.budget(100, holds_up_decoding=True)
        chunk = budget.take(0, missing) if budget.num_tokens else 0
        bound.add_prefill(budget)
        return chunk

    assert prefill(3) == 3  # in 6 of 20 seconds: 3, and those of a tile that sees 3 keys
    assert prefill(50) == 4  # in 8 of the 14 left; 8 tokens would take 8 + 8
    assert prefill(1) == 0, "more than half of the time is over"
    bound.add_decoding()
    assert [prefill(50), prefill(50)] == [8, 0]
    assert bound.budget(100, holds_up_decoding=False).take(0, 500) == 100, "nobody waits"
    assert prefill(50) == 8, "what nobody waited for does not count"


@pytest.mark.parametrize(
    ("missing", "budget", "shares"),
    [
        ([1, 1, 1], 8, [1, 1, 1]),
        ([10, 1, 5, 1], 8, [6, 1, 0, 1]),
        ([3, 4, 1], 8, [3, 4, 1]),
        ([1, 9], 1, [1, 0]),
        ([], 4, []),
    ],
)
def test_share_budget(missing: list[int], budget: int, shares: list[int]) -> None:
    starts = np.zeros(len(missing), np.int64)
    given, left = StepBudget(budget), budget - sum(shares)
    assert share_budget(starts, np.array(missing, dtype=np.int64), given).tolist() == shares
    assert given.num_tokens == left
