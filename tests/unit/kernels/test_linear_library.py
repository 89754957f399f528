"""Choosing among cuBLAS's ways, where there is no GPU to choose on."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels import linear_library
from spmd_rl.kernels.cublaslt import Shape


def test_a_gpu_without_memory_to_compare_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: Shape) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(linear_library, "proposed", full)
    shape = Shape(4096, 1024, 512, False, torch.bfloat16, torch.device("cuda"))
    with pytest.warns(UserWarning, match=r"no memory to compare cuBLAS's ways for Shape\(n=4096, k=1024, rows=512"):
        assert linear_library.choose(shape, lambda *given: None) is None
