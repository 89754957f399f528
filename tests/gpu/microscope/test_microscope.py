"""The microscope in bfloat16: faults planted in the engine found through its graphs, hashes as
those of eager steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import mismatch
from spmd_rl.kernels import sample_and_score
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.kernels.rowwise.row_hash import row_hashes
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.diagnose.kernel_profile import kernels_of
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import OWN_DRAWS, EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types.samples import Sample

pytestmark = pytest.mark.timeout(400)  # several at a time compile and share a GPU
DEVICE = torch.device("cuda")
MIDDLE = mismatch.NUM_LAYERS // 2


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(128, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mismatch.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> ReplayCase:
    return mismatch.sequences(read_spec(folder).vocab_size)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> TrainerPass:
    return TrainerPass(load_model(folder, torch.bfloat16, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 1024, 4099])
def test_hashes_are_those_of_the_cpu(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(70, columns, device=DEVICE).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = -0.0, torch.inf, torch.nan
    assert torch.equal(row_hashes(x).cpu(), row_hashes(x.cpu()))
    assert torch.equal(row_hashes(x[1:-1].t().contiguous().t()).cpu(), row_hashes(x.cpu())[1:-1])


def test_engine_and_trainer_agree_in_every_op(
    folder: Path, case: ReplayCase, trainer: TrainerPass
) -> None:
    path = mismatch.engine(folder)
    comparison = compare(path, trainer, case)
    assert comparison.results == ()
    assert path.facts["recorded graphs"] >= 4
    seen = {
        "q_proj",
        "k_proj",
        "v_proj",
        "q",
        "k",
        "v",
        "attention",
        "act",
        "down_proj",
        "logits",
        "logprob",
    }
    assert {point.op for point in comparison.points} >= seen


def test_the_drawing_op_is_seen_where_no_token_is_drawn_as_recorded(
    folder: Path, case: ReplayCase, trainer: TrainerPass
) -> None:
    path = mismatch.engine(folder)
    path.sampler = _wrong
    comparison = compare(path, trainer, case)
    scored = sum(len(one.response) for one in case.sequences)
    assert [
        (one.point.op, one.num_introduced_rows)
        for one in comparison.results
        if one.num_unequal_rows
    ] == [("logprob", scored)]
    assert path.facts[OWN_DRAWS] < scored / 4


def test_the_head_of_a_trainer_that_recomputes_all_agrees(
    folder: Path, case: ReplayCase, trainer: TrainerPass
) -> None:
    alike = TrainerPass(trainer.model, recompute="all", logit_rows=64)
    assert compare(mismatch.engine(folder), alike, case).results == ()


def test_automatic_splits_where_flash_attention_does_not_run(
    folder: Path, case: ReplayCase
) -> None:
    """No bits are promised there, so beside the same engine without."""
    cfg = NativeEngineConfig(max_batch=64, max_step_tokens=512)
    path, plain = (EnginePass(load_model(folder, torch.float32, DEVICE), cfg) for _ in range(2))
    plant("auto-splits", path)
    first = compare(path, plain, case).first_introduced
    assert first is not None
    assert first.point == Point(0, "attention")
    assert all(case.positions[row] >= 127 for row in first.differing_rows)


@pytest.mark.parametrize("fault", mismatch.EXPECTED)
def test_a_planted_fault_is_found_where_it_is(
    folder: Path, case: ReplayCase, trainer: TrainerPass, fault: str
) -> None:
    path = mismatch.engine(folder)
    plant(fault, path)
    comparison = compare(path, trainer, case)
    assert comparison.first_introduced is not None
    assert str(comparison.first_introduced.point) == mismatch.EXPECTED[fault].format(middle=MIDDLE)
    introduced = {one.point.op for one in comparison.results if one.status == "introduced"}
    assert introduced == {comparison.first_introduced.point.op} | mismatch.ALSO.get(fault, set())
    assert all(
        one.status == "equal"
        for one in comparison.results
        if one.point.order < comparison.first_introduced.point.order
    )
    assert path.facts["recorded graphs"] >= 4


@pytest.mark.parametrize(
    ("fault", "op", "says"),
    [
        ("split-k-qkv", "q_proj", "K summed in 2 parts"),
        ("split-k-qkv", "v_proj", "K summed in 2 parts"),
        (
            "split-k-gate-up",
            "act",
            "K summed in 2 parts, then float32 inside with one rounding, the contract's",
        ),
    ],
)
def test_the_arithmetic_of_a_joined_product_is_named(
    folder: Path, case: ReplayCase, trainer: TrainerPass, fault: str, op: str, says: str
) -> None:
    path = mismatch.engine(folder)
    plant(fault, path)
    cause = examine(ReplaySetup(case, path, trainer, str(folder))).explanations[Point(MIDDLE, op)]
    assert [match.description for match in cause.left.matches] == [says]
    assert len(cause.right.matches) == 1
    assert "the contract's" in cause.right.matches[0].description


def test_a_log_prob_is_explained_on_both_sides(
    folder: Path, case: ReplayCase, trainer: TrainerPass
) -> None:
    path = mismatch.engine(folder)
    plant("library-logprob", path)
    found = examine(ReplaySetup(case, path, trainer, str(folder)))
    (cause,) = found.explanations.values()
    scored = sum(len(one.response) for one in case.sequences)
    for side, says in ((cause.left, "the library's log-softmax"), (cause.right, "the contract's")):
        assert [match.num_rows for match in side.matches] == [scored]
        assert says in side.matches[0].description
    assert any("softmax" in kernel.name.lower() for kernel in cause.left.kernels)
    assert any(kernel.name == "Triton _combine" for kernel in cause.right.kernels)


def test_the_libraries_kernel_is_named(folder: Path, case: ReplayCase) -> None:
    path = mismatch.engine(folder)
    plant("library-linear", path)
    row = int(case.offsets[4]) + 140  # decoded alone
    down, attention = Point(MIDDLE, "down_proj"), Point(MIDDLE, "attention")
    kernels = kernels_of(path, case)
    assert any(kernel.splits == "K split" for kernel in kernels.at(down, row))
    others = kernels.at(Point(MIDDLE - 1, "down_proj"), row)
    assert [kernel.splits for kernel in others] == ["one chain"]
    assert all("tile " in kernel.tile for kernel in others)
    assert any(kernel.name.startswith("FlashAttention-4") for kernel in kernels.at(attention, row))


def test_hashes_from_recorded_graphs_are_those_of_eager_steps(
    folder: Path, case: ReplayCase
) -> None:
    path, tables = mismatch.engine(folder), {}
    for graphs in (True, False):
        path.cfg = replace(path.cfg, cuda_graphs=graphs)
        tap = HashTap(case.num_rows)
        path.run(case, tap)
        assert (path.facts["recorded graphs"] >= 4) == graphs
        tables[graphs] = tap.table
    # joined gate and up are to be seen where so many rows are computed that SiLU is another kernel
    assert len(tables[True]) == len(tables[False]) == 1 + 14 * mismatch.NUM_LAYERS + 3
    for point, hashes in tables[True].items():
        seen = (hashes != 0) & (tables[False][point] != 0)
        scored = sum(len(one.response) for one in case.sequences)
        at_least = 200 if point.op in ("gate_proj", "up_proj") else 900
        assert (
            seen[:-1].sum() == scored
            if point.op in ("logits", "logprob")
            else seen[:-1].sum() > at_least
        )
        assert torch.equal(hashes[seen], tables[False][point][seen]), str(point)


def test_splits_on_one_side_are_named_and_on_both_agree(
    folder: Path, case: ReplayCase, trainer: TrainerPass
) -> None:
    path = EnginePass(
        load_model(folder, torch.bfloat16, DEVICE),
        NativeEngineConfig(max_batch=64, attention_split=128),
    )
    alike = TrainerPass(trainer.model, attention_split=128)
    assert compare(path, alike, case).results == ()
    found = examine(ReplaySetup(case, path, trainer, str(folder)))
    point, cause = next(iter(found.explanations.items()))
    assert point == Point(0, "attention")
    assert cause.left.matches[-1].description.startswith("softmaxes of splits of one size")
    assert sum(match.num_rows for match in cause.left.matches) == cause.right.matches[0].num_rows


def test_a_small_cache_preempts_and_changes_no_bit(folder: Path, trainer: TrainerPass) -> None:
    path, rng = mismatch.engine(folder), np.random.default_rng(0)
    path.cfg = replace(path.cfg, num_pages=20)
    prompt = rng.integers(2, 30000, 150)
    case = ReplayCase(
        tuple(ReplaySequence(f"0:{n}", prompt, rng.integers(2, 30000, 260)) for n in range(8))
    )
    assert compare(path, trainer, case).results == ()
    assert path.facts["preemptions"] > 0
    assert path.facts["copied pages"] >= 7
    assert path.problems == []


def test_draws_of_the_replay_are_those_of_the_engine(folder: Path, trainer: TrainerPass) -> None:
    """With the weights that drew the samples, a replay draws every token as recorded, and sees the
    draw's log-probs.
    """
    path = mismatch.engine(folder)
    engine = NativeEngine(path.model, path.cfg, DEVICE)
    engine.sink().commit(0)
    prompt, sampling = (
        np.arange(2, 90, dtype=np.int32),
        SamplingConfig(max_tokens=40, ignore_eos=True),
    )
    for index in range(6):
        engine.submit(Request(3, index, prompt, sampling, seed=5))
    samples: list[Sample] = []
    while engine.has_work:
        samples += engine.step().finished
    drawn = [
        ReplaySequence(f"3:{one.index}", prompt, one.tokens, sampling, (3, one.index), seed=5)
        for one in samples
    ]
    case = ReplayCase(tuple(drawn))
    assert compare(path, trainer, case).results == ()
    assert path.facts[OWN_DRAWS] == 6 * 40
    path.sampler = _wrong_when_drawn
    comparison = compare(path, trainer, case)
    assert [
        (one.point.op, one.num_introduced_rows)
        for one in comparison.results
        if one.num_unequal_rows
    ] == [("logprob", 6 * 40)]


def _wrong(*rest: Any, **filters: Any) -> tuple[Tensor, Tensor]:
    tokens, logprobs = sample_and_score(*rest, **filters)
    return tokens, logprobs + 1


def _wrong_when_drawn(
    *rest: Any, given: Tensor | None = None, **filters: Any
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = sample_and_score(*rest, given=given, **filters)
    return tokens, logprobs + 1 if given is None else logprobs
