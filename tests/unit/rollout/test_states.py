"""Models whose layers hand states on: the same bits in any schedule, where prompts are shared, and
in the packs of a trainer.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from spmd_rl.kernels import KvCache
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.pages import Prefix, StateSnapshots
from tests.dist import host_graphs
from tests.specs import dense_spec
from tests.unit.rollout.test_exact import exercise, unequal, workload

FEATURES = (
    "num_preemptions",
    "num_retractions",
    "num_aborts",
    "num_partial_chunks",
    "num_hit_tokens",
    "num_copied_tails",
)
DELTA = GatedDelta(32, 2, 4, key_head_dim=8, value_head_dim=6, conv_size=4, rms_eps=1e-6)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Three layers with a state, and one of attention between them."""
    spec = dense_spec(
        "qwen3", vocab=37, hidden=32, inner=48, layers=4, heads=(4, 2, 8), positions=128
    )
    blocks = tuple(
        block if number == 2 else replace(block, mixer=DELTA)
        for number, block in enumerate(spec.blocks)
    )
    spec = replace(spec, blocks=blocks, init_std=0.4)
    model = CausalLM(spec).requires_grad_(False)
    fill(model, random_weights(spec, 3))
    return model


@pytest.fixture(scope="module")
def alone(model, new_engine, finish):
    """Each request in an engine of its own."""
    samples = {}
    for request in workload():
        samples |= finish(new_engine(model, max_batch=1, prefix_cache=False), [request])
    return samples


def test_any_schedule_gives_the_same_bits(model, new_engine, alone):
    exercise(model, new_engine, alone, FEATURES)


def test_a_step_that_ends_many_prompts_writes_each_slot_once(
    model, new_engine, finish, mismatched_tokens, monkeypatch
):
    """Ten prompts end in a step, and there are two slots: no order of writes may decide."""
    written: list[list[int]] = []
    copy = KvCache.copy_states

    def noting(self, sources, targets):
        written.append(list(targets))
        copy(self, sources, targets)

    monkeypatch.setattr(KvCache, "copy_states", noting)
    rng = np.random.default_rng(2)
    sampling = SamplingConfig(max_tokens=4)
    prompts = [rng.integers(2, 37, 6, np.int32) for _ in range(10)]
    requests = [Request(u, i, one, sampling) for u, one in enumerate(prompts) for i in range(3)]
    engine = new_engine(model, max_batch=16, page_size=4, max_step_tokens=200)
    samples = finish(engine, requests)
    assert all(len(set(targets)) == len(targets) for targets in written)
    assert any(set(targets) == {17, 18} for targets in written), "both are written in one step"
    assert engine.stats()["num_hit_tokens"] > 0
    assert mismatched_tokens(model, requests, samples) == 0


def test_decoded_logprobs_are_the_training_forwards(model, alone, mismatched_tokens):
    assert mismatched_tokens(model, workload(), alone) == 0
    for request in workload():
        assert mismatched_tokens(model, [request], alone) == 0


@pytest.mark.parametrize("max_batch", [3, 10])
def test_recorded_steps_give_the_same_bits(model, new_engine, finish, monkeypatch, max_batch):
    """Also where a prompt is a single token, and its row's slot holds what another left there."""
    sampling = SamplingConfig(max_tokens=12, temperature=0.9)
    requests = [msgspec.structs.replace(one, sampling=sampling) for one in workload()]
    requests += [Request(9, index, requests[0].prompt[:1], sampling) for index in range(2)]
    alone = {}
    for one in requests:
        alone |= finish(new_engine(model, max_batch=1, prefix_cache=False), [one])
    host_graphs.use(monkeypatch)
    monkeypatch.setattr(CausalLM, "fuse_projections", lambda self: None)
    engine = new_engine(model, max_batch=max_batch, page_size=4, num_pages=45)
    assert unequal(finish(engine, requests), alone) == 0
    stats = engine.stats()
    assert stats["num_graphs"] > 1 and stats["num_hit_tokens"] > 0


def test_later_samples_and_longer_prompts_begin_at_a_snapshot(
    model, new_engine, finish, mismatched_tokens
):
    """A conversation goes on, and is asked twice, in a batch of two."""
    engine = new_engine(model, max_batch=2, page_size=8)
    rng = np.random.default_rng(0)
    prompt, sampling = rng.integers(2, 37, 21, np.int32), SamplingConfig(max_tokens=9)
    hits = []
    for turn in range(3):
        before = engine.stats()["num_hit_tokens"]
        requests = [Request(turn, index, prompt, sampling) for index in range(4)]
        samples = finish(engine, requests)
        assert mismatched_tokens(model, requests, samples) == 0
        hits.append(engine.stats()["num_hit_tokens"] - before)
        answer = samples[turn, 0].tokens
        known, prompt = len(prompt) - 1, np.concatenate([prompt, answer, prompt[:5]])
    assert hits[0] == 3 * 20  # three samples of the first prompt
    # the first sample of a turn begins where the prompt of the turn before ended
    assert hits[1] > 3 * 20 + 20 and hits[2] > 3 * known


def test_control_a_state_that_is_not_copied_is_seen(model, new_engine, finish, alone, monkeypatch):
    monkeypatch.setattr(KvCache, "copy_states", lambda self, sources, targets: None)
    assert unequal(finish(new_engine(model, page_size=4), workload()), alone) > 0


def test_states_are_forgotten_with_the_weights(model, new_engine, finish):
    engine = new_engine(model, page_size=4)
    for version in (1, 2):
        engine.sink().commit(version)
        finish(engine, workload()[4:5])
        assert engine.stats()["num_hit_tokens"] == 0


def test_the_snapshot_used_least_recently_is_overwritten():
    snapshots = StateSnapshots(5, 2)
    first, second, third = (Prefix(b"page", bytes([one])) for one in range(3))
    taken = {one: snapshots.take(one) for one in (first, second)}
    assert set(taken.values()) == {5, 6} and snapshots.slot(first) == taken[first]
    assert snapshots.take(third) == taken[second]
    assert snapshots.tails_after(b"page") == [first.tail, third.tail]
    assert snapshots.take(first) == taken[first]
    snapshots.forget()
    assert not snapshots.tails_after(b"page") and snapshots.take(second) in (5, 6)
