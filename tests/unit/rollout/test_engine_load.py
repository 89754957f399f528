"""The load of engines: sums of what each step left, from one reading to the next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.engine_load import EngineLoad, LoadMeter, load_metrics
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types.samples import Sample

COUNTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_metrics_are_means_and_maxima_of_all_steps(engines: list[list[tuple[int, int]]]) -> None:
    loads = []
    for steps in engines:
        meter = LoadMeter()
        for running, waiting in steps:
            meter.add_step(running, waiting)
        loads.append(meter.take({}))
        assert meter.take({}) == EngineLoad()
    metrics = load_metrics(loads)
    used = [steps for steps in engines if any(running or waiting for running, waiting in steps)]
    steps = [one for of_engine in used for one in of_engine]
    assert bool(metrics) == bool(used)
    for place, name in enumerate(("running", "waiting")) if used else ():
        values = [one[place] for one in steps]
        assert metrics[f"engine/{name}_mean"] == pytest.approx(np.mean(values))
        assert metrics[f"engine/{name}_max"] == max(values)
    assert "engine/prefix_hits" not in metrics, "no engine has told what its cache had"


def test_an_engine_tells_what_waits_and_what_its_cache_had(
    model: object, new_engine: Callable[..., NativeEngine]
) -> None:
    engine, meter = new_engine(model, max_batch=2, page_size=16), LoadMeter()
    prompt = np.arange(2, 34, dtype=np.int32)

    def drawn(uids: range) -> list[Sample]:
        for uid in uids:
            engine.submit(Request(uid, 0, prompt, SamplingConfig(max_tokens=3, ignore_eos=True)))
        samples: list[Sample] = []
        while engine.has_work:
            samples += engine.step().finished
            meter.add_step(*engine.load)
        return samples

    assert len(drawn(range(1))) == 1
    first = load_metrics([meter.take(engine.stats())])
    assert first["engine/prefix_hits"] == 0
    assert first["engine/running_max"] == 1
    assert len(drawn(range(1, 6))) == 5
    second = load_metrics([meter.take(engine.stats())])
    assert second["engine/running_max"] == 2
    assert second["engine/waiting_max"] == 3
    assert 0.5 <= second["engine/prefix_hits"] < 1


def test_an_engine_tells_what_it_evicted_and_computed_again(
    model: object, new_engine: Callable[..., NativeEngine]
) -> None:
    sampling = SamplingConfig(max_tokens=24, ignore_eos=True)

    def metrics(num_pages: int) -> tuple[dict[str, float], int]:
        engine = new_engine(
            model, max_batch=4, page_size=4, num_pages=num_pages, prefix_cache=False
        )
        meter = LoadMeter()
        for uid in range(4):
            prompt = np.arange(2 + uid, 10 + uid, dtype=np.int32)
            engine.submit(Request(uid, 0, prompt, sampling))
        while engine.has_work:
            engine.step()
            meter.add_step(*engine.load)
        stats = engine.stats()
        again = stats["num_scheduled_tokens"] - 4 * (8 + 24 - 1)
        return load_metrics([meter.take(stats)]), again

    enough, again = metrics(num_pages=64)
    assert (enough["engine/preemptions"], enough["engine/recomputed_tokens"], again) == (0, 0, 0)
    few, again = metrics(num_pages=18)
    assert few["engine/preemptions"] > 0
    assert few["engine/recomputed_tokens"] == again > 0
