"""Long prompts beside decoding, where steps do either: chunks are bounded, and change no bit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.model_runner import ModelRunner
from spmd_rl.rollout.native.pages import PagePool
from spmd_rl.rollout.native.prefill_cost import PrefillCost
from spmd_rl.rollout.native.scheduler import Scheduler
from spmd_rl.rollout.native.step_budget import PrefillBound
from spmd_rl.types.samples import Sample
from tests.samples import Samples, finish
from tests.unit.rollout.test_scheduler import COST, FakeRunner

DECODING, LONG = range(3), 9  # uids
PROMPT = 30


def runner_with_long_prompt(most_s: float, **options: object) -> FakeRunner:
    """Three rows decode when a long prompt arrives."""
    runner = FakeRunner(
        max_batch=8, page_size=4, num_pages=64, max_step_tokens=16, ahead=True, most_s=most_s,
        **options,
    )  # fmt: skip
    for uid in DECODING:
        runner.submit(uid, [uid] * 2, max_tokens=30)
    for _ in range(3):
        runner.step()
    runner.submit(LONG, [7] * PROMPT, max_tokens=3)
    return runner


def lengths(runner: FakeRunner, num_steps: int) -> list[list[int]]:
    return [runner.step().lengths.tolist() for _ in range(num_steps)]


def test_chunks_take_turns_with_decoding_and_shrink_with_depth() -> None:
    runner = runner_with_long_prompt(most_s=22.0)
    planned = lengths(runner, 10)
    assert planned[::2] == [[12], [8], [4], [4], [2]]
    assert planned[1::2] == [[1, 1, 1]] * 4 + [[1, 1, 1, 1]]
    runner.run()
    assert runner.done[LONG] == [LONG + PROMPT + i for i in range(3)]


def test_without_a_bound_decoding_waits_for_the_whole_prompt() -> None:
    assert lengths(runner_with_long_prompt(math.inf), 3) == [[16], [14], [1, 1, 1, 1]]


def test_where_nobody_decodes_steps_are_whole() -> None:
    runner = FakeRunner(
        max_batch=8, page_size=4, num_pages=64, max_step_tokens=16, ahead=True, most_s=22.0
    )
    runner.submit(LONG, [7] * PROMPT, max_tokens=3)
    assert lengths(runner, 3) == [[16], [14], [1]]


def test_prompts_go_on_however_small_the_bound() -> None:
    runner = runner_with_long_prompt(most_s=0.0)
    chunks = [COST.wave_tokens] * (PROMPT // COST.wave_tokens) + [PROMPT % COST.wave_tokens]
    assert [length for [length] in lengths(runner, 2 * len(chunks))[::2]] == chunks


def test_samples_that_found_no_time_go_on_in_the_next_turn() -> None:
    """They compute the end of the prompt themselves, since it is short."""
    runner = runner_with_long_prompt(most_s=22.0)
    prompt = [7] * PROMPT
    runner.submit_all([10, 11], prompt, max_tokens=3)
    chunks = [step for step in lengths(runner, 12) if step != [1] * len(step)]
    assert chunks == [[12], [8], [4], [4], [2, 2], [2]]
    runner.run()
    assert [runner.done[uid] for uid in (10, 11)] == [
        [uid + PROMPT + i for i in range(3)] for uid in (10, 11)
    ]


def test_short_prompts_are_planned_as_without_a_bound() -> None:
    def plans(most_s: float) -> list[tuple[list[int], ...]]:
        runner = FakeRunner(
            max_batch=32, page_size=4, num_pages=400, max_step_tokens=400, ahead=True, most_s=most_s
        )
        for uid in range(100):
            runner.submit_all(
                [2 * uid, 2 * uid + 1], [uid] * 5, max_tokens=30, stop_after=5 + uid * 7 % 25
            )
        found = []
        while runner.scheduler.waiting or runner.scheduler.running:
            plan = runner.step()
            found.append((plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist()))
        return found

    unbounded = plans(math.inf)
    assert plans(300.0) == unbounded
    assert plans(5.0) != unbounded, "the control"


def test_control_a_missing_bound_is_seen() -> None:
    runner = runner_with_long_prompt(most_s=math.inf)
    runner.most_s = 22.0
    with pytest.raises(AssertionError, match="decoding waits for too much prefill"):
        runner.run()


# The native engine on the CPU, with a scheduler that plans as for recorded steps.


def workload() -> list[Request]:
    """Long prompts, some with a shared prefix, that arrive beside short ones."""
    rng = np.random.default_rng(3)
    stem = rng.integers(2, 37, 120, np.int32)
    other = np.concatenate([stem[:90], rng.integers(2, 37, 20, np.int32)])
    prompts = [stem[:3], stem[:17], stem, other, stem[:96], stem[5:35]]
    kinds = [{}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}]
    return [
        Request(
            uid, index, prompt,
            SamplingConfig(max_tokens=9 + 5 * uid % 17, ignore_eos=True, **kinds[uid % 4]), seed=2,
        )
        for uid, prompt in enumerate(prompts)
        for index in range(2)
    ]  # fmt: skip


def plan_apart(engine: NativeEngine, cost: PrefillCost, most_s: float) -> NativeEngine:
    """Give `engine` a scheduler whose steps either decode or prefill, within the bound."""
    engine.scheduler = Scheduler(
        engine.table,
        PagePool(engine.sizes.num_pages),
        max_step_tokens=engine.sizes.max_step_tokens,
        prefix_cache=engine.cfg.prefix_cache,
        eos_ids=engine.spec.eos_ids,
        separate_prefill=True,
        prefill_bound=PrefillBound(cost, most_s),
    )
    engine.sink().commit(0)
    return engine


def play(engine: NativeEngine, arrivals: list[int]) -> tuple[Samples, int]:
    """Submit so many requests before each step, while they last, then the rest.

    Returns the samples, and how many steps gave tokens while a prompt was half computed.
    """
    queue, samples, step, num_between = workload(), {}, 0, 0
    while queue or engine.has_work:
        for _ in range(arrivals[step] if step < len(arrivals) else len(queue)):
            if queue:
                engine.submit(queue.pop(0))
        output = engine.step()
        samples |= {(sample.prompt_uid, sample.index): sample for sample in output.finished}
        running = engine.scheduler.running
        started = engine.table.num_computed[running]
        is_half = (started > 0) & (started < engine.table.length[running] - 1)
        num_between += bool(is_half.any() and len(output.tokens))
        step += 1
    return samples, num_between


def unequal(samples: Samples, reference: Samples) -> int:
    def bits(sample: Sample) -> tuple[bytes, bytes, bytes]:
        return sample.tokens.tobytes(), sample.logprobs.tobytes(), sample.kept

    assert samples.keys() == reference.keys()
    return sum(bits(samples[name]) != bits(reference[name]) for name in reference)


@pytest.fixture(scope="module")
def alone(model, new_engine) -> Samples:
    """Each request in an engine of its own."""
    samples: Samples = {}
    for request in workload():
        samples |= finish(new_engine(model, max_batch=1, prefix_cache=False), [request])
    return samples


def test_any_bound_gives_the_same_bits(model, new_engine, alone) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=12)
    @example(most_s=40.0, wave_tokens=4, arrivals=[2, 0, 4], page_size=4, max_batch=12, spare=50)
    @example(most_s=0.0, wave_tokens=1, arrivals=[4], page_size=16, max_batch=12, spare=0)
    @given(
        most_s=st.sampled_from([0.0, 10.0, 40.0, 200.0, math.inf]),
        wave_tokens=st.sampled_from([1, 4, 16]),
        arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=6),
        page_size=st.sampled_from([1, 4, 16, 64]),
        max_batch=st.integers(1, 16),
        spare=st.sampled_from([0, 3, 50, 500]),
    )
    def check(most_s, wave_tokens, arrivals, page_size, max_batch, spare) -> None:
        engine = new_engine(
            model, max_batch=max_batch, max_step_tokens=max_batch + spare, page_size=page_size
        )
        cost = replace(COST, wave_tokens=wave_tokens)
        samples, num_between = play(plan_apart(engine, cost, most_s), arrivals)
        assert unequal(samples, alone) == 0
        seen.update(engine.stats())
        seen["num_between"] += num_between

    check()
    for feature in ("num_partial_chunks", "num_hit_tokens", "num_between"):
        assert seen[feature], f"{feature} was not exercised: {seen}"


@pytest.mark.parametrize(("most_s", "differ"), [(40.0, True), (math.inf, False)])
def test_control_bits_that_depend_on_chunks_are_seen(
    model, new_engine, alone, monkeypatch, most_s, differ
) -> None:
    """The fault: tokens of a chunk behind others get positions as if it were a prompt's first."""
    planned = ModelRunner._chunks

    def chunks(runner: ModelRunner, plan):
        found, counts = planned(runner, plan), plan.lengths[plan.lengths > 0]
        first = np.where(counts > 1, plan.starts[plan.lengths > 0], 0)
        return found._replace(positions=found.positions - np.repeat(first, counts))

    monkeypatch.setattr(ModelRunner, "_chunks", chunks)
    engine = new_engine(model, max_batch=12, max_step_tokens=2000, prefix_cache=False)
    samples, _ = play(plan_apart(engine, COST, most_s), [2, 0, 4])
    assert (unequal(samples, alone) > 0) is differ
