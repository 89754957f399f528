"""A sample's tokens and log-probs are a function of weights, prompt, sampling and seed: not of the
schedule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import spmd_rl.kernels.attention.blocked as attention
import spmd_rl.kernels.attention.paged as paged_attention
from spmd_rl.kernels import sample_and_score
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native import admission

FEATURES = (
    "num_preemptions",
    "num_retractions",
    "num_aborts",
    "num_partial_chunks",
    "num_hit_tokens",
    "num_evictions",
    "num_forks",
)


def workload(seed: int = 5) -> list[Request]:
    """Short and long prompts, some with a shared prefix; several samples each, some filtered."""
    rng = np.random.default_rng(7)
    stem = rng.integers(2, 37, 70, np.int32)
    other = np.concatenate([stem[:40], rng.integers(2, 37, 30, np.int32)])
    prompts = [stem[:3], stem[:17], stem[:66], other, stem[1:33]]
    shapes = [
        SamplingConfig(max_tokens=14, ignore_eos=True),
        SamplingConfig(max_tokens=22, temperature=0.7),
        SamplingConfig(max_tokens=9, temperature=1.3, top_k=5, top_p=0.9, ignore_eos=True),
        SamplingConfig(max_tokens=11, min_p=0.1),
        SamplingConfig(max_tokens=8, temperature=0.0),
    ]
    return [
        Request(uid, index, prompt, sampling, seed=seed + (uid == 3))
        for uid, (prompt, sampling) in enumerate(zip(prompts, shapes, strict=True))
        for index in range(2)
    ]


def unequal(samples, reference) -> int:
    """Samples that differ in any token, any bit of a log-prob, or how they ended."""
    assert samples.keys() == reference.keys()
    return sum(
        samples[name].tokens.tobytes() != reference[name].tokens.tobytes()
        or samples[name].logprobs.tobytes() != reference[name].logprobs.tobytes()
        or samples[name].kept != reference[name].kept
        or samples[name].status != reference[name].status
        for name in reference
    )


@pytest.fixture(scope="module")
def alone(model, new_engine, finish):
    """Each request in an engine of its own."""
    samples = {}
    for request in workload():
        samples |= finish(new_engine(model, max_batch=1, prefix_cache=False), [request])
    return samples


@dataclass(frozen=True)
class Schedule:
    order: list[int]
    arrivals: list[int]  # how many requests come in before each step, while they last
    aborts: dict[int, int]  # step -> request to abort and submit again
    retracts: set[int]  # steps before which all K/V is dropped
    cfg: dict[str, object]
    priorities: tuple[int, ...] = (0,)  # of the requests, in turn


TIGHT = Schedule(
    order=[9, 0, 8, 1, 7, 2, 6, 3, 5, 4],
    arrivals=[3, 0, 4],
    aborts={5: 2, 9: 7},
    retracts={12},
    cfg={
        "max_batch": 10,
        "page_size": 2,
        "max_step_tokens": 19,
        "num_pages": 41,
        "prefix_cache": True,
    },
)

TOGETHER = Schedule(
    order=list(range(10)),
    arrivals=[10],
    aborts={3: 1, 4: 2},
    retracts={6},
    cfg={
        "max_batch": 10,
        "page_size": 4,
        "max_step_tokens": 500,
        "num_pages": 0,
        "prefix_cache": True,
    },
)


@st.composite
def schedules(draw) -> Schedule:
    count = len(workload())
    max_batch = draw(st.integers(1, 16))
    page_size = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
    least = -(-80 // page_size)
    return Schedule(
        order=draw(st.permutations(range(count))),
        arrivals=draw(st.lists(st.integers(0, count), min_size=1, max_size=6)),
        aborts=draw(st.dictionaries(st.integers(0, 40), st.integers(0, count - 1), max_size=4)),
        retracts=draw(st.sets(st.integers(0, 30), max_size=2)),
        cfg={
            "max_batch": max_batch,
            "page_size": page_size,
            "max_step_tokens": max_batch + draw(st.sampled_from([0, 1, 3, 10, 50, 500])),
            "num_pages": draw(st.one_of(st.just(0), st.integers(least, 3 * least))),
            "prefix_cache": draw(st.booleans()),
        },
        priorities=draw(st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)),
    )


def play(engine, schedule: Schedule) -> dict:
    requests, samples, step = workload(), {}, 0
    numbers = [schedule.priorities[i % len(schedule.priorities)] for i in range(len(requests))]
    requests = [replace(one, priority=n) for one, n in zip(requests, numbers, strict=True)]
    queue = [requests[i] for i in schedule.order]
    while queue or engine.has_work:
        for _ in range(schedule.arrivals[step] if step < len(schedule.arrivals) else len(queue)):
            if queue:
                engine.submit(queue.pop(0))
        if step in schedule.aborts:
            victim = requests[schedule.aborts[step]]
            for partial in engine.abort(victim.uid, victim.index):
                assert partial.status == "aborted"
                engine.submit(victim.resumed(partial))
        if step in schedule.retracts:
            engine.sink().commit(0)
        samples |= {(sample.prompt_uid, sample.index): sample for sample in engine.step().finished}
        step += 1
    return samples


def exercise(model, new_engine, alone, features: tuple[str, ...]) -> None:
    """Play drawn schedules, which must give the samples of `alone` and reach all features."""
    seen: Counter[str] = Counter()

    @settings(max_examples=12)
    @given(schedule=schedules())
    @example(schedule=TIGHT)
    @example(schedule=TOGETHER)
    def check(schedule):
        engine = new_engine(model, **schedule.cfg)
        assert unequal(play(engine, schedule), alone) == 0
        seen.update(engine.stats())

    check()
    assert all(seen[feature] for feature in features), f"a feature was not exercised: {seen}"


def test_any_schedule_gives_the_same_bits(model, new_engine, alone):
    exercise(model, new_engine, alone, FEATURES)


@pytest.mark.parametrize(
    ("family", "num_heads", "num_kv_heads"), [("qwen3", 4, 2), ("qwen2", 6, 1), ("llama", 4, 4)]
)
def test_decoded_logprobs_are_the_training_forwards(
    new_model, new_engine, finish, mismatched_tokens, family, num_heads, num_kv_heads
):
    model = new_model(family, num_heads, num_kv_heads)
    engine = new_engine(model, max_batch=10, max_step_tokens=19, page_size=2, num_pages=41)
    samples = finish(engine, workload()[::-1])
    stats = engine.stats()
    assert mismatched_tokens(model, workload(), samples) == 0
    for packed_alone in workload():
        assert mismatched_tokens(model, [packed_alone], samples) == 0
    for feature in ("num_preemptions", "num_partial_chunks", "num_hit_tokens", "num_evictions"):
        assert stats[feature], f"{feature} was not exercised: {stats}"


@pytest.mark.parametrize(
    ("max_step_tokens", "feature"), [(64, "num_forks"), (16, "num_copied_tails")]
)
def test_a_copied_page_changes_no_bit(
    model, new_engine, finish, alone, monkeypatch, max_step_tokens, feature
):
    engine = new_engine(model, page_size=64, max_step_tokens=max_step_tokens)
    assert unequal(finish(engine, workload()), alone) == 0
    assert engine.stats()[feature] > 0
    monkeypatch.setattr(paged_attention.KvCache, "copy_pages", lambda self, sources, targets: None)
    assert (
        unequal(
            finish(new_engine(model, page_size=64, max_step_tokens=max_step_tokens), workload()),
            alone,
        )
        > 0
    )


def test_samples_of_one_prompt_differ_and_seeds_matter(model, new_engine, finish, alone):
    assert alone[0, 0].tokens.tobytes() != alone[0, 1].tokens.tobytes()
    other = finish(new_engine(model), workload(seed=6))
    assert unequal(other, alone) >= len(alone) - 2  # greedy samples have no randomness


@pytest.mark.parametrize("number", [0, 6])
def test_resume_under_the_same_weights_is_the_uninterrupted_sample(
    model, new_engine, finish, alone, number
):
    request = workload()[number]
    name = request.uid, request.index
    for pause in range(1, len(alone[name].tokens)):
        first = new_engine(model, max_step_tokens=128)  # for the whole prompt in one step
        second = new_engine(model, page_size=2, prefix_cache=False)
        first.submit(request)
        for _ in range(pause):
            first.step()
        (partial,) = first.abort()
        assert len(partial.tokens) == pause
        assert partial.kept.count(0) == (pause if request.sampling.replays else 0)
        assert alone[name].kept.startswith(partial.kept)
        resumed = finish(second, [request.resumed(partial)])
        assert unequal(resumed, {name: alone[name]}) == 0


def test_sets_that_an_answer_lacks_are_of_all_tokens(model, new_engine, finish):
    """Such as one of an engine that returns none."""
    request = workload()[6]
    engine = new_engine(model, max_step_tokens=128)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    (partial,) = engine.abort()
    resumed = finish(engine, [request.resumed(partial.replace(kept=b""))])[request.uid, 0]
    assert resumed.kept.startswith(bytes(3))
    assert resumed.kept.count(0) == len(resumed.tokens)


# Negative controls: each plants one fault, and the checkers above must see it.


def test_control_stale_cache_after_a_weight_change_is_seen(
    new_model, new_engine, finish, mismatched_tokens
):
    model, other = new_model(seed=0), new_model(seed=1)
    requests = workload()
    for told, expected in ((False, False), (True, True)):
        engine = new_engine(model, page_size=4)
        finish(engine, requests)
        kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
        model.load_state_dict(other.state_dict())
        if told:
            engine.sink().commit(1)
        again = finish(engine, requests)
        assert (mismatched_tokens(model, requests, again) == 0) is expected
        model.load_state_dict(kept)


def test_control_a_fork_from_another_prompt_is_seen(model, new_engine, finish, alone, monkeypatch):
    monkeypatch.setattr(
        admission, "_are_siblings", lambda request, first: len(request.prompt) == 17
    )
    assert unequal(finish(new_engine(model), workload()), alone) > 0


def test_control_shifted_random_stream_is_seen(model, new_engine, finish, alone):
    def shifted(logits, inv_temperature, bases, positions, **filters):
        return sample_and_score(logits, inv_temperature, bases, positions + 1, **filters)

    assert unequal(finish(new_engine(model, sampler=shifted), workload()), alone) > 0


def test_control_another_block_order_is_seen(
    model, new_engine, finish, alone, mismatched_tokens, monkeypatch
):
    def one_block(weights, v, num_rows):
        flat, values = weights.view(-1, *weights.shape[2:]), v.view(-1, *v.shape[2:])
        return torch.bmm(flat, values).view(*weights.shape[:3], -1)[:, :, :num_rows]

    with monkeypatch.context() as patch:
        patch.setattr(attention, "_ascending_sums", one_block)
        samples = finish(new_engine(model), workload())
    assert mismatched_tokens(model, workload(), samples) > 0
    assert unequal(samples, alone) > 0


def test_control_keys_from_a_neighbours_page_are_seen(
    model, new_engine, finish, alone, monkeypatch
):
    build = paged_attention.PagedAttention.chunks

    def shifted(cache, *, page_table, **rest):
        return build(cache, page_table=np.roll(page_table, 1, axis=0), **rest)

    monkeypatch.setattr(paged_attention.PagedAttention, "chunks", shifted)
    assert unequal(finish(new_engine(model), workload()), alone) > 0
