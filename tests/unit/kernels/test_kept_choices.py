"""Choices of cuBLAS algorithms that are kept, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.linear import cublas, kept_choices
from spmd_rl.kernels.linear.cublaslt import CublasAlgorithm, Gemm, Shape
from spmd_rl.kernels.runtime.disk_cache import DiskCache

SHAPE = Shape(4096, 1024, 1024, False, torch.bfloat16, torch.device("cuda"))


def nothing(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    pass


def ours(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    pass


def algorithms(*identities: bytes) -> list[CublasAlgorithm]:
    return [CublasAlgorithm(nothing, 1, identity) for identity in identities]


class Gpu:
    """A GPU that proposes algorithms; the last one with the bits is the fastest."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.proposed = algorithms(b"a", b"b")
        self.wrong: set[tuple[bytes, int]] = set()  # identity and number of rows
        self.compared: list[tuple[bytes, int]] = []
        self.races: list[list[Gemm]] = []
        self.version = 13
        patch.setattr(kept_choices, "user_cache", lambda: DiskCache(folder))
        patch.setattr(kept_choices, "gpu", lambda device: ("H100", 9, 0, 132))
        patch.setattr(kept_choices, "_software", lambda: (self.version,))
        for module in (kept_choices, cublas):
            patch.setattr(module, "propose_algorithms", lambda shape: self.proposed)
        patch.setattr(cublas, "has_reference_bits", self.has_reference_bits)
        patch.setattr(cublas, "fastest", self.fastest)

    def has_reference_bits(self, way: CublasAlgorithm, shape: Shape) -> bool:
        self.compared.append((way.identity, shape.rows))
        return (way.identity, shape.rows) not in self.wrong

    def fastest(self, ways: Sequence[Gemm], shape: Shape) -> Gemm:
        self.races.append(list(ways))
        return ways[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return Gpu(monkeypatch, tmp_path / "cache")


def test_a_second_process_compares_bits_and_times_nothing(device: Gpu) -> None:
    first = kept_choices.choose(SHAPE, 513, ours)
    assert first is device.proposed[1]
    device.proposed, device.compared = algorithms(b"b", b"a"), []
    second = kept_choices.choose(SHAPE, 513, ours)
    assert second is device.proposed[0]
    assert device.compared == [(b"b", 1024), (b"b", 513)]
    assert len(device.races) == 1


def test_ours_is_kept_too(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "fastest", lambda ways, shape: ours)
    assert kept_choices.choose(SHAPE, 513, ours) is None
    device.compared = []
    assert kept_choices.choose(SHAPE, 513, ours) is None
    assert device.compared == []


@pytest.mark.parametrize("rows", [1024, 513])
def test_a_kept_algorithm_with_other_bits_is_not_taken(device: Gpu, rows: int) -> None:
    kept_choices.choose(SHAPE, 513, ours)
    device.wrong = {(b"b", rows)}
    assert kept_choices.choose(SHAPE, 513, ours) is device.proposed[0]
    assert len(device.races) == 2


def test_a_kept_algorithm_that_is_not_proposed_is_not_taken(device: Gpu) -> None:
    kept_choices.choose(SHAPE, 513, ours)
    device.proposed = algorithms(b"c")
    assert kept_choices.choose(SHAPE, 513, ours) is device.proposed[0]
    device.proposed = [CublasAlgorithm(nothing, 2, b"c")]
    assert kept_choices.choose(SHAPE, 513, ours) is None, "it says that it cuts K"


@pytest.mark.parametrize(
    ("shape", "least_rows"),
    [
        (SHAPE._replace(n=2048), 513),
        (SHAPE._replace(k=2048), 513),
        (SHAPE._replace(rows=2048), 513),
        (SHAPE._replace(has_bias=True), 513),
        (SHAPE._replace(out_dtype=torch.float32), 513),
        (SHAPE, 1024),
    ],
)
def test_each_shape_has_a_choice_of_its_own(device: Gpu, shape: Shape, least_rows: int) -> None:
    kept_choices.choose(SHAPE, 513, ours)
    kept_choices.choose(shape, least_rows, ours)
    assert len(device.races) == 2


def test_another_version_races_again(device: Gpu) -> None:
    kept_choices.choose(SHAPE, 513, ours)
    device.version = 14
    kept_choices.choose(SHAPE, 513, ours)
    assert len(device.races) == 2


def test_a_choice_for_lack_of_memory_is_not_kept(
    device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> Gemm:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cublas, "fastest", full)
        with pytest.warns(UserWarning, match="no memory"):
            assert kept_choices.choose(SHAPE, 513, ours) is None
    assert kept_choices.choose(SHAPE, 513, ours) is device.proposed[1]


def test_without_a_cache_every_process_races(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_choices, "user_cache", lambda: None)
    for _ in range(2):
        assert kept_choices.choose(SHAPE, 513, ours) is device.proposed[1]
    assert len(device.races) == 2
