"""Steps of an engine with graphs do not wait for the GPU, but for what the step before drew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.model_runner import ModelRunner
from spmd_rl.rollout.native.prefill_graphs import PrefillGraphs
from spmd_rl.rollout.native.sampled_tokens import SampledOnHost, SampledTokens
from spmd_rl.rollout.native.step_plan import StepPlan
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.samples import Samples, finish


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Make torch raise at a copy to the host or a wait for a stream; it does not see events."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def decoding(model: CausalLM, num_rows: int, cuda_graphs: bool = True) -> NativeEngine:
    """An engine in the middle of so many answers, its graphs recorded."""
    cfg = replace(USUAL, page_size=16, num_pages=400, cuda_graphs=cuda_graphs)
    engine, rng = new_engine(model, cfg), np.random.default_rng(4)
    sampling = SamplingConfig(max_tokens=150, ignore_eos=True)
    for uid in range(num_rows):
        engine.submit(
            Request(uid, 0, rng.integers(2, SPEC.vocab_size, 40).astype(np.int32), sampling, seed=3)
        )
    for _ in range(20):
        progress = engine.step()
    assert len(progress.tokens) == num_rows
    return engine


def test_decoding_steps_do_not_synchronize(model: CausalLM) -> None:
    """Over the borders of pages too, where the batch is uploaded again."""
    num_rows, num_steps = 20, 40
    engine = decoding(model, num_rows)
    recorded = engine.stats()["num_graphs"]
    with waiting_raises():
        drawn = [len(engine.step().tokens) for _ in range(num_steps)]
    assert drawn == [num_rows] * num_steps
    assert engine.stats()["num_graphs"] == recorded


def test_steps_in_which_prompts_come_and_sequences_end_do_not_synchronize(
    model: CausalLM, alone: Samples
) -> None:
    """The second time, when all graphs are recorded. Half of the prompts wait until others stop or
    have all tokens.
    """
    engine = new_engine(model)
    samples: Samples = {}
    assert unequal(finish(engine, workload()), alone) == 0
    engine.sink().commit(1)  # nothing of the first time is found in the cache
    recorded = engine.stats()["num_graphs"]
    came_later, ended_beside_others = [], []
    for request in workload():
        engine.submit(request)
    with waiting_raises():
        while engine.has_work:
            before, finished = engine.stats(), engine.step().finished
            after = engine.stats()
            if samples:
                came_later.append(after["num_admissions"] - before["num_admissions"])
            if after["num_running"]:
                ended_beside_others += [sample.status for sample in finished]
            samples |= {(sample.prompt_uid, sample.index): sample for sample in finished}
    assert unequal(samples, alone) == 0
    assert engine.stats()["num_graphs"] == recorded
    assert sum(came > 0 for came in came_later) > 5
    assert {"completed", "truncated"} == set(ended_beside_others)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_step_waits_for_the_one_before(
    model: CausalLM, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an event; without graphs, for what it has just launched: the control."""
    engine, launch, arrays = (
        decoding(model, 3, cuda_graphs),
        ModelRunner.launch,
        SampledTokens.wait,
    )
    launched: list[SampledTokens] = []
    waited_for_newest: list[bool] = []

    def launches(steps: ModelRunner, plan: StepPlan, samples: NDArray[np.bool_]) -> SampledTokens:
        launched.append(launch(steps, plan, samples))
        return launched[-1]

    def waits(drawn: SampledTokens) -> SampledOnHost:
        waited_for_newest.append(drawn is launched[-1])
        return arrays(drawn)

    monkeypatch.setattr(ModelRunner, "launch", launches)
    monkeypatch.setattr(SampledTokens, "wait", waits)
    for _ in range(10):
        assert len(engine.step().tokens) == 3
    assert waited_for_newest == [not cuda_graphs] * 10


@pytest.mark.parametrize(
    ("graphs", "name"), [(DecodeGraphs, "launch"), (PrefillGraphs, "hidden_states")]
)
def test_control_a_wait_in_a_step_is_seen(
    model: CausalLM, graphs: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, engine, work = torch.ones(1, device=DEVICE), decoding(model, 3), getattr(graphs, name)

    def waits(*given: object) -> object:
        assert one.item() == 1
        return work(*given)

    with waiting_raises(), pytest.raises(RuntimeError, match="synchronizing"):
        one.item()
    monkeypatch.setattr(graphs, name, waits)
    if graphs is PrefillGraphs:
        engine.submit(Request(3, 0, np.arange(2, 42, dtype=np.int32), SamplingConfig(max_tokens=9)))
    with waiting_raises(), pytest.raises(RuntimeError, match="synchronizing"):
        engine.step()
    assert one.item() == 1
