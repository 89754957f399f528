"""An engine whose keys and values are in 8 bits: the trainer's bits, whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmd_rl.check.engine import check_engine
from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.rollout.kv_pages import cache_token_bytes
from spmd_rl.rollout.native.auto_sizes import auto_pages
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from tests.samples import Samples
from tests.unit.rollout.test_exact import unequal, workload

EXPONENTS = (-1, -2)
CODED: dict[str, Any] = {"cache": "e4m3", "cache_exponents": EXPONENTS}
TIGHT = {"max_batch": 10, "max_step_tokens": 19, "page_size": 2, "num_pages": 41}


@pytest.fixture(scope="module")
def coded(new_model: Any) -> Any:
    return new_model(exponents=EXPONENTS)


@pytest.fixture(scope="module")
def drawn(coded: Any, new_engine: Any, finish: Any) -> Samples:
    """Every request in an engine of its own."""
    samples = {}
    for request in workload():
        samples |= finish(new_engine(coded, max_batch=1, prefix_cache=False, **CODED), [request])
    return samples


def test_preemption_prefixes_and_chunks_change_no_bit(
    coded: Any, new_engine: Any, finish: Any, mismatched_tokens: Any, drawn: Samples
) -> None:
    engine = new_engine(coded, **TIGHT, **CODED)
    samples = finish(engine, workload()[::-1])
    assert unequal(samples, drawn) == 0
    assert mismatched_tokens(coded, workload(), samples) == 0
    stats = engine.stats()
    for feature in ("num_preemptions", "num_partial_chunks", "num_hit_tokens", "num_evictions"):
        assert stats[feature], f"{feature} was not exercised: {stats}"
    assert stats["num_coded"] > stats["num_clipped"] == 0


@pytest.mark.parametrize(("most", "feature"), [(64, "num_forks"), (16, "num_copied_tails")])
def test_a_copied_page_of_codes_changes_no_bit(
    coded: Any, new_engine: Any, finish: Any, drawn: Samples, most: int, feature: str
) -> None:
    engine = new_engine(coded, page_size=64, max_step_tokens=most, **CODED)
    assert unequal(finish(engine, workload()), drawn) == 0
    assert engine.stats()[feature] > 0


def test_control_other_numbers_are_found(
    coded: Any, new_model: Any, mismatched_tokens: Any, drawn: Samples
) -> None:
    """A trainer that rounds to other scales, or not at all, has other log-probs."""
    for exponents in ((-1, 3), (5, -2), None):
        assert mismatched_tokens(new_model(exponents=exponents), workload(), drawn) > 0


def test_control_one_flipped_code_is_found(
    coded: Any, new_engine: Any, mismatched_tokens: Any
) -> None:
    request = workload()[4]
    engine = new_engine(coded, **CODED)
    engine.submit(request)
    samples = {}
    for step in range(100):
        if step == 3:
            page = engine.table.pages[0, 0]
            engine._runner.cache.data[0, 0, 0, page * engine.sizes.page_size + 2, 1] ^= 0x20
        for sample in engine.step().finished:
            samples[sample.prompt_uid, sample.index] = sample
        if samples:
            break
    found = mismatched_tokens(coded, [request], samples)
    assert 0 < found < len(samples[request.uid, request.index].tokens)


def test_what_is_clipped_is_counted_and_shared(
    new_model: Any, new_engine: Any, finish: Any, mismatched_tokens: Any
) -> None:
    model = new_model(exponents=(-9, -9))
    engine = new_engine(model, cache="e4m3", cache_exponents=(-9, -9))
    samples = finish(engine, workload())
    assert engine.stats()["num_clipped"] > 0
    assert mismatched_tokens(model, workload(), samples) == 0


def test_codes_take_a_byte(coded: Any, new_engine: Any) -> None:
    """And attention decodes one layer at a time."""
    spec = coded.spec
    whole = cache_token_bytes(spec, 2)
    assert cache_token_bytes(spec, 2, cache="e4m3") == whole // 2 + whole // spec.num_layers
    engine = new_engine(coded, num_pages=40, **CODED)
    assert engine.stats()["kv_bytes"] == 40 * engine.sizes.page_size * whole // 2
    assert set(engine.contract()["cache"].split()) >= {"2^-1", "2^-2"}


def test_more_pages_fit(new_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_rl.rollout.native.auto_sizes.CPU_POOL_BYTES", 1 << 20)
    spec, cpu = new_model().spec, torch.device("cpu")
    pages = [
        auto_pages(spec, cfg, cpu, torch.float32, 4)
        for cfg in (NativeEngineConfig(), NativeEngineConfig(cache="e4m3"))
    ]
    # of four bytes one is left, and of two layers one is decoded: 8 to 2 + 4
    assert pages[1] / pages[0] == pytest.approx(8 / 6, rel=0.01)


@pytest.mark.parametrize("kind", [NativeEngineConfig, SglangEngineConfig])
def test_formats_that_differ_are_refused(kind: type) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.cache = 'e4m3'"):
        check_engine(kind(), RunConfig(exact=False), TrainerConfig(cache="e4m3"))
    one, other = NativeEngineConfig(**CODED), TrainerConfig(cache="e4m3")
    with pytest.raises(ConfigError, match=r"engine\.cache_exponents = \(-1, -2\)"):
        check_engine(one, RunConfig(), other)
    check_engine(one, RunConfig(), TrainerConfig(**CODED))


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="two exponents from -32 to 32"):
        NativeEngineConfig(cache="e4m3", cache_exponents=(0, 33))
    with pytest.raises(ConfigError, match="without cache"):
        TrainerConfig(cache_exponents=(1, 0))
    with pytest.raises(ConfigError, match="without cache"):
        FrozenConfig(cache_exponents=(1, 0))


def test_a_reference_is_rounded_as_its_trainer() -> None:
    like = FrozenConfig.like(TrainerConfig(**CODED))
    assert (like.cache, like.cache_exponents) == ("e4m3", EXPONENTS)
