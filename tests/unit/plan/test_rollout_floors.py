"""Floors of a rollout's time by tp, against tables made elsewhere and a run that was timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import config
from spmd_rl.config.load import load
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan import main
from spmd_rl.plan.concurrency import Queue, RunningSequences
from spmd_rl.plan.decode_floor import (
    H100,
    H200,
    ONE_SHOT_S,
    StepTime,
    all_reduce_s,
    decode_work,
    gpu_of,
    one_shot_s,
)
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.resolve import resolve
from spmd_rl.plan.tp_choice import RolloutFloor, TpChoice, rollout_floor
from spmd_rl.recipes.grpo import Config
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.specs import with_layers
from tests.unit.plan.test_fewest_gpus import SHAPES

ENGINE = NativeEngineConfig()
SIZES = (1, 2, 4, 8)
# milliseconds on an H200 by tp, with sums in bfloat16 in which each rank reads all parts
STEPS = {
    ("8B", 1): (3.56, 2.06, 1.18, 0.86),
    ("8B", 64): (3.56, 2.68, 2.34, 2.04),
    ("32B", 1): (15.0, 8.0, 4.3, 2.6),
    ("32B", 64): (15.0, 9.1, 6.3, 4.7),
}
# 30B-A3B: sequences of a rank, ep, keys of each, and milliseconds on an H200 and on an H100
MIXTURE_STEPS = [
    (1, 1, 0, 1.43, 2.06),
    (8, 1, 0, 6.08, 8.8),
    (64, 1, 0, 14.0, 20.2),
    (64, 1, 1024, 15.5, 22.4),
    (256, 1, 1024, 20.3, 29.2),
    (8, 8, 0, 2.26, 3.3),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, shape in (SHAPES | {"30B-A3B": config("30B-A3B")}).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    return folder


def spec_of(models: Path, name: str) -> ModelSpec:
    return read_spec(str(models / name))


@pytest.mark.parametrize(("name", "batch"), STEPS)
def test_bytes_and_sums_are_those_of_the_table(models: Path, name: str, batch: int) -> None:
    """The table takes the latency of 512 KiB for the 640 KiB of 32B at batch 64, so it is lower."""
    spec = spec_of(models, name)
    within = 0.085 if (name, batch) == ("32B", 64) else 0.03
    for tp, expected in zip(SIZES, STEPS[name, batch], strict=True):
        work = decode_work(spec, ENGINE, tp, 1)
        one_sum = one_shot_s(batch * spec.hidden_size * 2, tp) if tp > 1 else 0.0
        found = work.time(H200, batch, 0)
        assert found.kv_s == found.arithmetic_s == 0
        assert 1e3 * (found.weights_s + 2 * spec.num_layers * one_sum) == pytest.approx(
            expected, rel=within
        )
        if batch == 1:
            assert 1e3 * found.seconds == pytest.approx(expected, rel=0.08), "with fp32 parts"


@pytest.mark.parametrize(("batch", "ep", "keys", "on_h200", "on_h100"), MIXTURE_STEPS)
def test_a_batch_reads_the_experts_that_it_touches(
    models: Path, batch: int, ep: int, keys: int, on_h200: float, on_h100: float
) -> None:
    work = decode_work(spec_of(models, "30B-A3B"), ENGINE, 1, ep)
    for gpu, expected in (H200, on_h200), (H100, on_h100):
        assert 1e3 * work.time(gpu, batch, keys).seconds == pytest.approx(expected, rel=0.02)


def test_a_rollout_that_was_timed_took_little_more(models: Path) -> None:
    """GRPO of an 8B shape on four H200s, 8 prompts x 16 samples of 7,168 tokens: 57 s."""
    spec, tokens = spec_of(models, "8B"), 7168
    seconds = {
        tp: tokens * decode_work(spec, ENGINE, tp, 1).time(H200, 32 * tp, tokens / 2).seconds
        for tp in (1, 2, 4)
    }
    assert 0.9 * 57 < seconds[1] < 57
    assert seconds[1] > seconds[2] > seconds[4]
    assert 1.25 < seconds[1] / seconds[4] < 1.4


def test_a_large_batch_is_bound_by_arithmetic(models: Path) -> None:
    spec = spec_of(models, "8B")
    for tp in (1, 2):
        found = decode_work(spec, ENGINE, tp, 1).time(H200, 8192, 0)
        assert found.arithmetic_s > found.weights_s
        computing = found.weights_s + found.arithmetic_s
        assert computing == pytest.approx(8192 * spec.flops_per_token / tp / 788e12, rel=1e-6)


def test_what_ranks_of_an_engine_read(models: Path) -> None:
    """A tied embedding is read as the head; ranks beyond the heads of keys have the same ones."""
    tied = spec_of(models, "0.6B")
    assert tied.tie_embeddings
    whole = decode_work(tied, ENGINE, 1, 1)
    assert whole.shared_bytes == 2 * tied.num_parameters
    half = decode_work(tied, ENGINE, 2, 1)
    assert half.shared_bytes == pytest.approx(whole.shared_bytes / 2, rel=0.001)
    few = with_layers(tied, num_kv_heads=2)
    assert [decode_work(few, ENGINE, tp, 1).kv_bytes for tp in SIZES] == [
        28 * 2 * heads * 128 * 2 for heads in (2, 1, 1, 1)
    ]
    codes = decode_work(tied, replace(ENGINE, weights="e4m3"), 1, 1)
    assert 0.5 < codes.shared_bytes / whole.shared_bytes < 0.65


@given(tp=st.sampled_from([2, 4, 8]), few=st.integers(1, 1 << 22), more=st.integers(0, 1 << 22))
def test_a_larger_sum_takes_no_less(tp: int, few: int, more: int) -> None:
    least = all_reduce_s(few, 4, tp)
    assert ONE_SHOT_S[tp][0] <= least <= all_reduce_s(few + more, 4, tp)
    assert all_reduce_s(few, 2, tp) <= least
    if few * 4 <= 1 << 20:
        assert least <= one_shot_s(few * 4, tp)


def test_one_rank_adds_nothing() -> None:
    assert all_reduce_s(1 << 20, 4, 1) == 0
    assert [one_shot_s(1 << power, 4) for power in (10, 12, 15, 20)] == [
        3.7e-6,
        3.7e-6,
        4.8e-6,
        31.1e-6,
    ]


def test_rates_go_by_the_memory_of_a_gpu() -> None:
    assert [gpu_of(int(gib * 2**30)) for gib in (24, 79.1, 139.8)] == [H100, H100, H200]


def configured(models: Path, *words: str) -> Any:
    return load(Config, None, [f"model={models / '8B'}", "data=x", *words])


def test_waves_follow_each_other(models: Path) -> None:
    """Pages hold 10 sequences of 8,192 tokens, of 64; six full waves, and one of four."""
    pages = f"engine.num_pages={10 * 64}"
    words = ("prompts_per_step=4", "sampling.num_samples=16", "sampling.max_tokens=7168", pages)
    cfg = configured(models, *words)
    plan = resolve(cfg, 1, 280 << 30)
    found = rollout_floor(RunNeeds.of(cfg), plan, H200)
    assert found is not None and found.queue.num_waves == 7
    work = decode_work(spec_of(models, "8B"), ENGINE, 1, 1)
    one, last = (work.time(H200, rows, 8192 - 3584).seconds for rows in (10, 4))
    assert found.seconds == pytest.approx(7168 * (6 * one + last))
    assert str(found.queue).endswith("hold 10 at once, of 8,192 tokens each, so they take 7 waves")


def floor(tp: int, held: int, step: tuple[float, float, float, float]) -> RolloutFloor:
    queue = Queue(64, RunningSequences(64, 8192), held)
    time = StepTime(*step)
    return RolloutFloor(tp, 8 // tp, queue, time, time.seconds * queue.num_waves * 7168)


def test_the_sentence_names_what_decides() -> None:
    first = floor(1, 64, (4e-3, 4e-3, 0.0, 0.0))
    cases = [
        ([first], 1, "no other fits this run"),
        ([first, floor(2, 64, (2e-3, 4e-3, 0.0, 5e-4))], 2, "50% weights, which ranks that share"),
        ([first, floor(2, 64, (2e-3, 4e-3, 0.0, 3e-3))], 1, "with tp 2 the latency of sums would"),
        (
            [floor(1, 64, (1e-4, 9e-3, 0.0, 0.0)), floor(2, 64, (5e-5, 9e-3, 0.0, 1e-4))],
            1,
            "99% of",
        ),
        (
            [floor(1, 6, (4e-3, 1e-3, 0.0, 0.0)), floor(2, 32, (2e-3, 5e-3, 0.0, 0.0))],
            2,
            "overflow",
        ),
        ([first, floor(2, 64, (4e-3, 2e-3, 0.0, 0.0))], 2, "50% keys and values, which ranks"),
    ]
    for floors, tp, words in cases:
        found = TpChoice(floors, H200, 1, 512, 8192)
        assert found.best.tp == tp
        assert found.why.startswith(f"tp {tp}: ") and words in found.why, found.why


def test_a_gain_that_is_too_small_is_left(models: Path) -> None:
    first = floor(1, 64, (4e-3, 4e-3, 0.0, 0.0))
    for gain, tp in (0.04, 1), (0.06, 2):
        more = replace(first, tp=2, seconds=first.seconds * (1 - gain))
        assert TpChoice([first, more], H200, 1, 512, 8192).best.tp == tp


@pytest.mark.parametrize("name", ["8B", "30B-A3B"])
def test_the_plan_prints_what_fits_and_the_best(
    models: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["--world=4", "--gpu-gib=139.8", "--prompts_per_step=8", "--sampling.num_samples=16"]
    words += ["--sampling.max_tokens=7168", "--trainer.backend.offload=none"]
    words += ["--trainer.backend.recompute=all"]
    assert main(["grpo", f"--model={models / name}", "--data=x.jsonl", *words]) == 0
    out = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(out) if line.startswith("rollout      of "))
    assert out[begin].endswith("floors at the rates of an H200, not measurements")
    assert "128 sequences up to 8,192 tokens" in out[begin]
    assert [row[:3] for row in out[begin + 2 : begin + 5]] == ["* 1", "  2", "  4"]
    assert out[begin + 5].startswith("  least time with tp 4: ")
