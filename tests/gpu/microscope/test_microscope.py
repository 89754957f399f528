"""The microscope in bfloat16: planted faults found, hashes the same on both devices and in a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import mismatch
from spmd_rl.kernels import PagedAttention
from spmd_rl.kernels.flash import flash_takes
from spmd_rl.kernels.row_hash import row_hashes
from spmd_rl.microscope.case import Case
from spmd_rl.microscope.compare import compare
from spmd_rl.microscope.faults import plant
from spmd_rl.microscope.identity import kernels_of
from spmd_rl.microscope.paths import EnginePath, TrainerPath, load_model
from spmd_rl.microscope.points import Point
from spmd_rl.microscope.taps import Hashes
from spmd_rl.microscope.watch import watch
from spmd_rl.model.spec import ModelSpec

DEVICE = torch.device("cuda")
MIDDLE = mismatch.NUM_LAYERS // 2


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_takes(128, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mismatch.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return mismatch.sequences(ModelSpec.from_folder(folder).vocab_size)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> TrainerPath:
    return TrainerPath(load_model(folder, torch.bfloat16, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 1024, 4099])
def test_hashes_are_those_of_the_cpu(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(70, columns, device=DEVICE).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = -0.0, torch.inf, torch.nan
    assert torch.equal(row_hashes(x).cpu(), row_hashes(x.cpu()))
    assert torch.equal(row_hashes(x[1:-1].t().contiguous().t()).cpu(), row_hashes(x.cpu())[1:-1])


def test_engine_and_trainer_agree_in_every_op(folder: Path, case: Case, trainer: TrainerPath) -> None:
    comparison = compare(mismatch.engine(folder), trainer, case)
    assert comparison.findings == ()
    assert {point.op for point in comparison.points} >= {"q", "k", "v", "attention", "act", "down_proj", "logprob"}


@pytest.mark.parametrize("fault", mismatch.EXPECTED)
def test_a_planted_fault_is_found_where_it_is(folder: Path, case: Case, trainer: TrainerPath, fault: str) -> None:
    path = mismatch.engine(folder)
    plant(fault, path)
    comparison = compare(path, trainer, case)
    assert comparison.first is not None
    assert str(comparison.first.point) == mismatch.EXPECTED[fault].format(middle=MIDDLE)
    introduced = {one.point.op for one in comparison.findings if one.status == "introduced"}
    assert introduced == ({"q", "k"} if fault == "rope-bf16" else {comparison.first.point.op})
    assert all(one.status == "equal" for one in comparison.findings if one.point.place < comparison.first.point.place)


def test_the_libraries_kernel_is_named(folder: Path, case: Case) -> None:
    path = mismatch.engine(folder)
    plant("library-linear", path)
    row = int(case.offsets[4]) + 140  # decoded alone
    down, attention = Point(MIDDLE, "down_proj"), Point(MIDDLE, "attention")
    kernels = kernels_of(path, case)
    assert any(kernel.splits == "K split" for kernel in kernels.at(down, row, 1024))
    others = kernels.at(Point(MIDDLE - 1, "down_proj"), row, 1024)
    assert [kernel.splits for kernel in others] == ["one chain"]
    assert any(kernel.name.startswith("FlashAttention-4") for kernel in kernels.at(attention, row, 2048))


def recorded(path: EnginePath, forward: Callable[[], None], taps: Hashes) -> torch.cuda.CUDAGraph:
    with watch(path.model, taps.see):
        forward()  # makes the tables, and compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
    return graph


@torch.inference_mode()
def test_hashes_in_a_captured_graph_are_those_of_the_eager_pass(folder: Path) -> None:
    path = mismatch.engine(folder)
    rows = torch.arange(16, device=DEVICE)
    tokens, positions = torch.arange(100, 116, device=DEVICE), torch.zeros(16, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(16, device=DEVICE) * path.page_size
    pages = torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None]
    cache = path._cache(16)
    taps = [Hashes(16), Hashes(16)]

    def forward(tap: Hashes) -> None:
        tap.begin(rows, rows, rows)
        attend = PagedAttention.decode(cache, pages=pages, num_keys=(positions + 1).int(), slots=slots)
        path.model(tokens, positions, attend, rows)

    graph = recorded(path, lambda: forward(taps[0]), taps[0])
    for shift in (7, 1000):
        tokens.copy_(torch.arange(16, device=DEVICE) + shift)
        graph.replay()
        with watch(path.model, taps[1].see):
            forward(taps[1])
        assert taps[0].table.keys() == taps[1].table.keys()
        assert len(taps[0].table) == 1 + 9 * mismatch.NUM_LAYERS + 2  # joined projections are seen at q, k, v and act
        for point, hashes in taps[0].table.items():
            assert torch.equal(hashes, taps[1].table[point]), str(point)
            assert np.unique(hashes.cpu()).size == 16
