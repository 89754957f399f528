"""cuBLAS runs only algorithms that have the reference kernel's bits, and the fastest of them.

The start-up check is compared with another one, on other data. Our kernel runs where it refuses all
algorithms, where ours is faster, and while a graph is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.cublas import LENT_BYTES, by_torch
from spmd_rl.kernels.linear import cublas, dispatch
from spmd_rl.kernels.linear.cublas import choose, has_reference_bits
from spmd_rl.kernels.linear.cublaslt import CublasAlgorithm, Gemm, Shape, propose_algorithms
from spmd_rl.kernels.linear.dispatch import matmul, most_rows, own_matmul_into
from spmd_rl.kernels.linear.tiles import REFERENCE, Tile

if torch.cuda.is_available():
    from spmd_rl.kernels.linear.triton_gemm import matmul_into

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(
    not HOPPER, reason="the reference chain was compared with cuBLAS on Hopper"
)

DEVICE = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
# Rows and columns of the weight, rows of x: few tiles and a long K, where a library may split it,
# and many tiles.
SHAPES = [
    *((1024, 3072, 16), (1024, 3072, 128), (1024, 3072, 512), (4096, 4096, 16), (4096, 4096, 128)),
    *(
        (4096, 12288, 256),
        (6144, 4096, 128),
        (1024, 2048, 128),
        (1024, 2048, 512),
        (6144, 1024, 256),
    ),
]
SMALL = 2.0**-16  # of a bias beside which the rounding of the chain is not lost
Rows = Callable[..., Tensor]
Unequal = Callable[[Tensor, Tensor], int]
Choose = Callable[[Shape, int, Gemm], Gemm | None]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    matmul_into(out, x, weight, bias, REFERENCE)
    return out


def mirrored(x: Tensor, sign: int) -> Tensor:
    half = x[:, : x.shape[1] // 2]
    return torch.cat([half, sign * half.flip(1)], dim=1)


def differing(way: Gemm, shape: Shape, rows: Rows, unequal: Unequal) -> int:
    """Count elements of `way`'s product that differ from the reference's, over several data.

    In mirrored data the second half's products cancel the first half's, the last first. Only the
    rounding is left, which even bf16 shows.
    """
    n, k, m, has_bias, dtype, *_ = shape
    count, out = 0, torch.empty(m, n, dtype=dtype, device=DEVICE)
    bias = rows("normal", 1, n)[0] * SMALL if has_bias else None
    for kind in ("normal", "wide"):
        x, weight = rows(kind, m, k), rows(kind, n, k)
        for pair in ((x, weight), (mirrored(x, -1), mirrored(weight, 1))):
            way(out, *pair, bias)
            count += unequal(out, reference(*pair, bias, dtype))
    return count


@pytest.mark.parametrize(("dtype", "has_bias"), [(BF16, False), (FP32, False), (BF16, True)])
def test_verdicts_are_those_of_another_comparison(
    dtype: torch.dtype, has_bias: bool, rows: Rows, unequal: Unequal
) -> None:
    verdicts = set()
    for one in SHAPES:
        shape = Shape(*one, has_bias, dtype, DEVICE)
        ways: list[Gemm] = [by_torch, *propose_algorithms(shape, (0, LENT_BYTES))]
        for way in ways:
            verdict = has_reference_bits(way, shape)
            assert verdict == (differing(way, shape, rows, unequal) == 0), f"{shape}"
            verdicts.add(verdict)
    assert verdicts >= ({True} if has_bias else {True, False}), (
        "no way was refused, or none admitted"
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_without_memory_for_partial_sums_cublas_proposes_no_way_that_splits_k(
    dtype: torch.dtype,
) -> None:
    shapes = [Shape(*one, False, dtype, DEVICE) for one in SHAPES]
    proposals = [(way, shape) for shape in shapes for way in propose_algorithms(shape)]
    assert len(proposals) > len(SHAPES)
    assert [shape for way, shape in proposals if not has_reference_bits(way, shape)] == []


def test_each_way_is_proposed_once() -> None:
    shape = Shape(1024, 4096, 16384, False, BF16, DEVICE)
    assert len(propose_algorithms(shape, (0, 0))) == len(propose_algorithms(shape)) > 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_ways_that_are_refused_are_those_that_say_they_cut_k(dtype: torch.dtype) -> None:
    shapes = [Shape(*one, False, dtype, DEVICE) for one in SHAPES]
    said = {
        (way.splits > 1, has_reference_bits(way, shape))
        for shape in shapes
        for way in propose_algorithms(shape, (LENT_BYTES,))
    }
    assert said == {(True, False), (False, True)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Record the shapes that the library multiplies, in a process that has chosen nothing yet."""
    seen: list[torch.Size] = []
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "choose", choosing(seen))
    return seen


def choosing(seen: list[torch.Size]) -> Choose:
    """Return a `choose` of the library's ways that record their shapes, where ours is slow."""

    def watched(shape: Shape, least_rows: int, ours: Gemm) -> Gemm | None:
        way = choose(shape, least_rows, _ten_times(ours))
        if way is None:
            return None

        def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            seen.append(x.shape)
            way(out, x, weight, bias)

        return multiply

    return watched


@pytest.mark.parametrize("has_bias", [False, True])
def test_large_products_go_to_the_library(
    has_bias: bool, calls: list[torch.Size], rows: Rows, unequal: Unequal
) -> None:
    n, k, m = 6144, 1024, 2048 + 512 + 3
    x, weight = rows("normal", m, k), rows("normal", n, k)
    bias = rows("normal", 1, n)[0] if has_bias else None
    assert unequal(matmul(x, weight, bias, BF16), reference(x, weight, bias, BF16)) == 0
    assert calls == [x.shape]


@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(6144, 1024, BF16), (1024, 3072, BF16), (32768, 1024, FP32)]
)
def test_any_number_of_rows_goes_to_the_library_whole(
    n: int, k: int, dtype: torch.dtype, calls: list[torch.Size], rows: Rows, unequal: Unequal
) -> None:
    """An algorithm for the next power of two multiplies fewer rows by the same kernel."""
    weight = rows("normal", n, k)
    numbers = (512, 515, 1025, 1663, 2049, 4001, 8193, 15903, 16384, 20001)
    for m in numbers:
        x = rows("wide", m, k)
        assert unequal(matmul(x, weight, None, dtype), reference(x, weight, None, dtype)) == 0
        assert calls.pop() == x.shape
    most = most_rows(n, k)
    x = rows("wide", most + 3617, k)
    assert unequal(matmul(x, weight, None, dtype), reference(x, weight, None, dtype)) == 0
    assert [shape[0] for shape in calls] == [most, 3617]
    powers = {1 << (m - 1).bit_length() for m in (*numbers, most)}
    assert {shape.rows for shape in dispatch._chosen} == powers


@pytest.mark.parametrize("rows_of_x", [128, 256, 512])
def test_refused_products_are_ours(
    rows_of_x: int,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[torch.Size],
    rows: Rows,
    unequal: Unequal,
) -> None:
    n, k = 6144, 4096
    monkeypatch.setattr(
        cublas, "propose_algorithms", lambda shape: [CublasAlgorithm(_split_in_two, 1)]
    )
    x, weight = rows("normal", rows_of_x, k), rows("normal", n, k)
    assert unequal(matmul(x, weight, None, FP32), reference(x, weight, None, FP32)) == 0
    assert calls == []
    assert dispatch._chosen == {Shape(n, k, rows_of_x, False, FP32, x.device): None}


def test_operands_at_odd_addresses_are_moved_first(
    calls: list[torch.Size], rows: Rows, unequal: Unequal
) -> None:
    n, k, m = 6144, 1024, 512

    def at_an_odd_address(given: Tensor) -> Tensor:
        odd = torch.empty(given.numel() + 1, dtype=BF16, device=DEVICE)[1:].view_as(given)
        return odd.copy_(given)

    given = rows("normal", m, k), rows("normal", n, k), rows("normal", 1, n)[0]
    x, weight, bias = (at_an_odd_address(one) for one in given)
    expected = reference(x.clone(), weight.clone(), bias.clone(), BF16)
    assert unequal(matmul(x, weight, bias, BF16), expected) == 0
    assert calls == [x.shape]


@pytest.mark.parametrize("step", ["has_reference_bits", "fastest"])
def test_ours_multiplies_where_there_is_no_memory_to_compare(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(*given: object) -> None:
        asked.append(given)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cublas, step, full)
    assert choose(Shape(4096, 4096, 1024, False, BF16, DEVICE), 513, _ten_times(by_torch)) is None
    assert len(asked) == 1


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(4096, 4096, 1024, False, BF16, DEVICE)
    slow = _ten_times(by_torch)
    ways = [CublasAlgorithm(slow, 1), CublasAlgorithm(by_torch, 1), CublasAlgorithm(slow, 1)]
    monkeypatch.setattr(cublas, "propose_algorithms", lambda shape: ways)
    assert choose(shape, 513, slow) is ways[1]
    assert choose(shape, 513, lambda *given: None) is None
    monkeypatch.setattr(cublas, "propose_algorithms", lambda shape: [CublasAlgorithm(by_torch, 2)])
    assert choose(shape, 513, slow) is None, (
        "what says that it cuts K is not asked whether it is fast"
    )


def test_nothing_is_chosen_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch, calls: list[torch.Size], rows: Rows, unequal: Unequal
) -> None:
    """A graph recorded before has our product. The choice is made at the first call outside."""
    (n, k, m), watched = (1024, 2048, 512), choosing(calls)
    asked: list[Shape] = []
    x, weight = rows("normal", m, k), rows("normal", n, k)
    expected = reference(x, weight, None, BF16)

    def ask(shape: Shape, least_rows: int, ours: Gemm) -> Gemm | None:
        asked.append(shape)
        return (
            None if torch.cuda.is_current_stream_capturing() else watched(shape, least_rows, ours)
        )

    def recorded() -> int:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = matmul(x, weight, None, BF16)
        out.fill_(torch.nan)
        graph.replay()
        return unequal(out, expected)

    monkeypatch.setattr(dispatch, "choose", ask)
    own_matmul_into(torch.empty_like(expected), x, weight, None)  # compiles
    assert recorded() == 0
    assert (asked, dispatch._chosen) == ([], {})
    assert unequal(matmul(x, weight, None, BF16), expected) == 0
    assert asked == list(dispatch._chosen) == [Shape(n, k, m, False, BF16, x.device)]
    calls.clear()
    assert recorded() == 0
    assert (calls, len(asked)) == ([x.shape], 1)


@pytest.mark.parametrize(
    ("k", "bias", "dtype"),
    [(1024, 64, BF16), (2048, 64, FP32), (2048, 63, BF16)],
    ids=["k", "type", "bias"],
)
def test_other_operands_are_refused(k: int, bias: int, dtype: torch.dtype) -> None:
    x, weight = (
        torch.zeros(512, 2048, dtype=BF16, device=DEVICE),
        torch.zeros(64, k, dtype=dtype, device=DEVICE),
    )
    with pytest.raises(ValueError, match="no operand of a product with"):
        matmul(x, weight, torch.zeros(bias, dtype=BF16, device=DEVICE), BF16)


def _ten_times(way: Gemm) -> Gemm:
    def slow(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for _ in range(10):
            way(out, x, weight, bias)

    return slow


def _in_one_chain(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    matmul_into(out, x, weight, bias, Tile(64, 64, 128, 4, 4))


def _split_in_two(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    half = x.shape[1] // 2
    total = reference(x[:, :half], weight[:, :half], bias, FP32)
    out.copy_(total + reference(x[:, half:], weight[:, half:], None, FP32))


def _rounded_before_the_bias(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(
        reference(x, weight, None, BF16)
        if bias is None
        else reference(x, weight, None, BF16) + bias
    )


@pytest.mark.parametrize(
    ("product", "has_bias", "dtype", "verdict"),
    [
        (_in_one_chain, False, BF16, True),
        (_in_one_chain, True, BF16, True),
        (_in_one_chain, False, FP32, True),
        (_split_in_two, False, BF16, False),
        (_split_in_two, True, BF16, False),
        (_split_in_two, False, FP32, False),
        (_rounded_before_the_bias, True, BF16, False),
    ],
)
def test_control_another_chain_is_refused(
    product: Gemm, has_bias: bool, dtype: torch.dtype, verdict: bool
) -> None:
    """Another tile of the same chain passes. Two chains, or two roundings, do not."""
    assert has_reference_bits(product, Shape(1024, 1024, 128, has_bias, dtype, DEVICE)) is verdict
