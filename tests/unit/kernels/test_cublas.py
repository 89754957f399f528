"""Choice among cuBLAS's algorithms, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.linear import cublas, cublaslt, dispatch
from spmd_rl.kernels.linear.cublaslt import CublasAlgorithm, Gemm, Shape, Unsupported


def test_a_gpu_without_memory_to_compare_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: Shape) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cublas, "propose_algorithms", full)
    shape = Shape(4096, 1024, 512, False, torch.bfloat16, torch.device("cuda"))
    with pytest.warns(
        UserWarning, match=r"no memory to compare cuBLAS's ways for Shape\(n=4096, k=1024, rows=512"
    ):
        assert cublas.choose(shape, 512, lambda *given: None) is None


@pytest.mark.parametrize(
    ("rows", "n", "shared"),
    [
        *(
            (1, 4096, None),
            (100, 4096, None),
            (127, 4096, None),
            (129, 4096, None),
            (255, 4096, None),
        ),
        *(
            (128, 4096, (128, 128)),
            (128, 2048, None),
            (256, 4096, (256, 256)),
            (256, 2048, None),
            (64, 4096, None),
        ),
        *(
            (257, 16, None),
            (511, 16, None),
            (512, 16, (512, 512)),
            (513, 16, (513, 1024)),
            (1024, 16, (513, 1024)),
        ),
        *((9000, 16, (8193, 16384)), (16384, 16, (8193, 16384)), (512, 12, None), (0, 4096, None)),
    ],
)
def test_products_that_share_a_way(
    monkeypatch: pytest.MonkeyPatch, rows: int, n: int, shared: tuple[int, int] | None
) -> None:
    """(fewest, most) rows for which algorithms are compared, or None where cuBLAS is not asked."""
    asked, multiplied = watch(monkeypatch)
    x, weight = operands(rows, n)
    assert dispatch.matmul(x, weight, None, torch.float32).shape == (rows, n)
    assert asked == ([shared] if shared else [])
    assert multiplied == ([("cuBLAS" if shared else "ours", rows)] if rows else [])


def test_more_rows_than_ways_are_compared_for_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, multiplied = watch(monkeypatch)
    rows = dispatch.most_rows(16, 8)
    dispatch.matmul(*operands(2 * rows + 700, 16), None, torch.float32)
    dispatch.matmul(*operands(rows + 3, 16), None, torch.float32)
    assert asked == [(rows // 2 + 1, rows), (513, 1024)]
    most = ("cuBLAS", rows)
    assert multiplied == [most, most, ("cuBLAS", 700), most, ("ours", 3)]


@pytest.mark.parametrize("width", [16, 576, 19456, 57344, 151936])
def test_a_call_has_no_more_elements_than_32_bits_can_index(width: int) -> None:
    for n, k in ((width, 64), (64, width)):
        rows = dispatch.most_rows(n, k)
        assert rows & (rows - 1) == 0
        assert rows * width <= dispatch.MOST_ELEMENTS
        assert rows == dispatch.MOST_ROWS or 2 * rows * width > dispatch.MOST_ELEMENTS


def test_a_number_of_rows_that_is_refused_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _, multiplied = watch(monkeypatch, refused=600)
    dispatch.matmul(*operands(700, 16), None, torch.float32)
    with pytest.warns(
        UserWarning, match="a slower kernel multiplies 600 rows: cublasLtMatmul: status 7"
    ):
        dispatch.matmul(*operands(600, 16), None, torch.float32)
    assert multiplied == [("cuBLAS", 700), ("ours", 600)]


def operands(rows: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(n, 8, dtype=torch.bfloat16)


def watch(
    monkeypatch: pytest.MonkeyPatch, refused: int | None = None
) -> tuple[list[tuple[int, int]], list[tuple[str, int]]]:
    """Record the (fewest, most) rows of requests, and what multiplied how many rows."""
    asked, multiplied = [], []

    def choose(shape: Shape, least_rows: int, ours: Gemm) -> Gemm:
        def way(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            if len(x) == refused:
                raise Unsupported("cublasLtMatmul: status 7")
            multiplied.append(("cuBLAS", len(x)))

        asked.append((least_rows, shape.rows))
        return way

    def own_matmul_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        multiplied.append(("ours", len(x)))

    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setattr(dispatch, "own_matmul_into", own_matmul_into)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return asked, multiplied


def test_a_way_must_serve_the_least_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four candidates: right at both ends, only for the most rows, refusing few rows, wrong."""
    good, most_only, refusing, other = ways = [
        CublasAlgorithm(lambda *given: None, 1) for _ in range(4)
    ]

    def has_reference_bits(way: CublasAlgorithm, shape: Shape) -> bool:
        if way is refusing and shape.rows == 513:
            raise Unsupported("cublasLtMatmul: status 15")
        return way is good or (way is not other and shape.rows == 1024)

    def fastest(ways: list[Gemm], shape: Shape) -> Gemm:
        raced.append(ways)
        return ways[-1]

    raced: list[list[Gemm]] = []
    monkeypatch.setattr(cublas, "propose_algorithms", lambda shape: ways)
    monkeypatch.setattr(cublas, "has_reference_bits", has_reference_bits)
    monkeypatch.setattr(cublas, "fastest", fastest)
    shape = Shape(4096, 1024, 1024, False, torch.bfloat16, torch.device("cuda"))
    assert cublas.choose(shape, 513, max) is good
    assert cublas.choose(shape, 1024, max) is refusing
    assert raced == [[max, good], [max, good, most_only, refusing]]


@pytest.mark.parametrize(
    ("status", "refused"), [(7, True), (15, True), (1, False), (13, False), (14, False)]
)
def test_a_call_that_fails_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, status: int, refused: bool
) -> None:
    """A failure of the device or the library is not survived."""
    monkeypatch.setattr(
        cublaslt, "_library", lambda: SimpleNamespace(cublasLtMatmul=lambda: status)
    )
    with pytest.raises(RuntimeError, match=f"cublasLtMatmul: status {status}") as error:
        cublaslt._call("cublasLtMatmul")
    assert isinstance(error.value, Unsupported) is refused
