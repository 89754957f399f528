"""Prompts in bounded chunks between recorded decoding steps change no sample; decoding goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.step_plan import StepPlan
from tests.gpu.rollout.graph_case import USUAL, new_engine, unequal, workload
from tests.gpu.rollout.test_waits import waiting_raises
from tests.samples import Samples

LEAST = 1e-6  # ms: one chunk between two decoding steps
CHUNKS = replace(USUAL, max_step_tokens=64, max_prefill_ms=LEAST)


def turns_of(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that counts, at each decoding step to come, the rows with half a prompt."""
    schedule, table = engine.scheduler.schedule, engine.table
    counts: list[int] = []

    def missing(rows: np.ndarray) -> np.ndarray:
        return table.length[rows] - table.num_computed[rows]

    def watched() -> StepPlan:
        plan = schedule()
        if len(plan.rows) and (missing(plan.rows) == 1).all():
            counts.append(int((missing(np.array(engine.scheduler.running)) > 1).sum()))
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    return counts


def generate(engine: NativeEngine) -> Samples:
    """The long prompts arrive while the short ones decode."""
    requests = sorted(workload(), key=lambda request: len(request.prompt))
    samples: Samples = {}
    arrivals = {0: requests[:16], 12: requests[16:32], 24: requests[32:]}
    step = 0
    while arrivals or engine.has_work:
        come: list[Request] = arrivals.pop(step, [])
        for request in come:
            engine.submit(request)
        samples |= {(one.prompt_uid, one.index): one for one in engine.step().finished}
        step += 1
    return samples


@pytest.mark.parametrize(
    "cfg",
    [
        CHUNKS,
        replace(CHUNKS, prefix_cache=False),
        replace(CHUNKS, page_size=16, num_pages=400),
        replace(CHUNKS, max_step_tokens=256),
    ],
    ids=["usual", "nothing shared", "small pages", "whole prompts"],
)
def test_bounded_chunks_give_the_samples_of_single_steps(
    model: CausalLM, alone: Samples, cfg: NativeEngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, cfg)
    turns = turns_of(engine, monkeypatch)
    assert unequal(generate(engine), alone) == 0
    assert any(turns)


def test_chunks_that_reach_into_a_second_split(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = replace(CHUNKS, attention_split=128)
    engine = new_engine(model, cfg)
    turns = turns_of(engine, monkeypatch)
    expected = generate(
        new_engine(model, replace(cfg, cuda_graphs=False, max_prefill_ms=USUAL.max_prefill_ms))
    )
    assert unequal(generate(engine), expected) == 0
    assert any(turns)


def test_without_a_bound_decoding_waits_for_prompts(
    model: CausalLM, alone: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, replace(CHUNKS, max_prefill_ms=0.0))
    turns = turns_of(engine, monkeypatch)
    assert unequal(generate(engine), alone) == 0
    assert turns and not any(turns)


def test_turns_do_not_synchronize(model: CausalLM, alone: Samples) -> None:
    """The second time, when all graphs are recorded."""
    engine = new_engine(model, CHUNKS)
    assert unequal(generate(engine), alone) == 0
    engine.sink().commit(1)  # nothing of the first time is found in the cache
    recorded = engine.stats()["num_graphs"]
    with waiting_raises():
        assert unequal(generate(engine), alone) == 0
    assert engine.stats()["num_graphs"] == recorded
