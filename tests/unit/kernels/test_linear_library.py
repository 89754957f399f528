"""Choosing among cuBLAS's ways, where there is no GPU to choose on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear_library, linear_plan
from spmd_rl.kernels.cublaslt import Shape, Way


def test_a_gpu_without_memory_to_compare_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: Shape) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(linear_library, "proposed", full)
    shape = Shape(4096, 1024, 512, False, torch.bfloat16, torch.device("cuda"))
    with pytest.warns(UserWarning, match=r"no memory to compare cuBLAS's ways for Shape\(n=4096, k=1024, rows=512"):
        assert linear_library.choose(shape, 257, lambda *given: None) is None


@pytest.mark.parametrize(
    ("rows", "n", "shared"),
    [
        *((1, 4096, None), (100, 4096, None), (127, 4096, None), (129, 4096, None), (255, 4096, None)),
        *((128, 4096, (128, 128)), (128, 2048, None), (256, 4096, (256, 256)), (256, 2048, None), (64, 4096, None)),
        *((257, 16, (257, 512)), (512, 16, (257, 512)), (513, 16, (513, 1024)), (9000, 16, (8193, 16384))),
        *((16384, 16, (8193, 16384)), (40000, 16, (8193, 16384)), (512, 12, None), (0, 4096, None)),
    ],
)
def test_products_that_share_a_way(
    monkeypatch: pytest.MonkeyPatch, rows: int, n: int, shared: tuple[int, int] | None
) -> None:
    """(the least and the most rows that it is compared for); None where no way of cuBLAS's is asked for."""
    asked, multiplied = [], []

    def choose(shape: Shape, least_rows: int, ours: Way) -> Way:
        asked.append((least_rows, shape.rows))
        return lambda out, x, weight, bias: multiplied.append(("cuBLAS", len(x)))

    def ours_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        multiplied.append(("ours", len(x)))

    monkeypatch.setattr(linear_plan, "_chosen", {})
    monkeypatch.setattr(linear_plan, "choose", choose)
    monkeypatch.setattr(linear_plan, "ours_into", ours_into)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, weight = torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(n, 8, dtype=torch.bfloat16)
    assert linear_plan.matmul(x, weight, None, torch.float32).shape == (rows, n)
    assert asked == ([shared] if shared else [])
    assert multiplied == ([("cuBLAS" if shared else "ours", rows)] if rows else [])
