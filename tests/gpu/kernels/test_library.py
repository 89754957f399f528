"""cuBLAS multiplies those shapes alone for which it was seen to give the reference kernel's bits.

What the start-up check says of a shape is held to another comparison, of other data; and where the check refuses, and
while a graph is recorded, the product is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear_plan
from spmd_rl.kernels.linear_plan import matmul, ours_into, proves_equal
from spmd_rl.kernels.linear_tiles import REFERENCE

if torch.cuda.is_available():
    from spmd_rl.kernels.linear_triton import matmul_into

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="the reference chain was compared with cuBLAS on Hopper")

DEVICE = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
# Rows and columns of the weight, rows of x: few tiles and a long K, where a library may split it, and many tiles.
SHAPES = [
    *((1024, 3072, 16), (1024, 3072, 128), (1024, 3072, 512), (4096, 4096, 16), (4096, 4096, 128)),
    *((4096, 12288, 256), (6144, 4096, 128), (1024, 2048, 128), (1024, 2048, 512), (6144, 1024, 256)),
]
ASKED_ABOUT = [(4096, 12288, 256), (6144, 4096, 128), (1024, 2048, 512), (6144, 1024, 512)]  # what `matmul` asks about
SMALL = 2.0**-16  # of a bias beside which the rounding of the chain is not lost
Rows = Callable[..., Tensor]
Unequal = Callable[[Tensor, Tensor], int]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    matmul_into(out, x, weight, bias, REFERENCE)
    return out


def library(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, x, weight.t())
    return torch.mm(x, weight.t()) if dtype == x.dtype else torch.mm(x, weight.t(), out_dtype=dtype)


def mirrored(x: Tensor, sign: int) -> Tensor:
    half = x[:, : x.shape[1] // 2]
    return torch.cat([half, sign * half.flip(1)], dim=1)


def differing(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype, rows: Rows, unequal: Unequal) -> int:
    """Elements that differ between the library's product and the reference's, over data of several kinds.

    Mirrored, the products of the second half take away what those of the first added up to, the last first: what is
    left is the rounding, which even bf16 shows.
    """
    (n, k, m), count = shape, 0
    bias = rows("normal", 1, n)[0] * SMALL if has_bias else None
    for kind in ("normal", "wide"):
        x, weight = rows(kind, m, k), rows(kind, n, k)
        for pair in ((x, weight), (mirrored(x, -1), mirrored(weight, 1))):
            count += unequal(library(*pair, bias, dtype), reference(*pair, bias, dtype))
    return count


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_verdicts_are_those_of_another_comparison(dtype: torch.dtype, rows: Rows, unequal: Unequal) -> None:
    verdicts = {shape: proves_equal(*shape, False, dtype, DEVICE) for shape in SHAPES}
    assert verdicts == {shape: differing(shape, False, dtype, rows, unequal) == 0 for shape in SHAPES}
    assert set(verdicts.values()) == {True, False}, "no shape was refused, or none admitted"


def test_verdicts_with_a_bias_are_those_of_another_comparison(rows: Rows, unequal: Unequal) -> None:
    verdicts = {shape: proves_equal(*shape, True, BF16, DEVICE) for shape in SHAPES}
    assert verdicts == {shape: differing(shape, True, BF16, rows, unequal) == 0 for shape in SHAPES}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what the library was asked to multiply, in a process that has decided nothing yet."""
    seen: list[torch.Size] = []
    multiply = linear_plan._cublas

    def watched(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        seen.append(x.shape)
        multiply(out, x, weight, bias)

    monkeypatch.setattr(linear_plan, "_admitted", {})
    monkeypatch.setattr(linear_plan, "_cublas", watched)
    return seen


def test_products_go_where_the_check_says(calls: list[torch.Size], rows: Rows, unequal: Unequal) -> None:
    """In fp32, so that no shape goes to a kernel that takes shares; the bits are the reference's either way."""
    verdicts = set()
    for n, k, m in ASKED_ABOUT:
        x, weight = rows("normal", m, k), rows("normal", n, k)
        expected = reference(x, weight, None, FP32)
        assert unequal(matmul(x, weight, None, FP32), expected) == 0
        verdict = linear_plan._admitted[n, k, m, False, FP32, x.device]
        calls.clear()
        assert unequal(matmul(x, weight, None, FP32), expected) == 0
        assert calls == ([x.shape] if verdict else [])
        verdicts.add(verdict)
    assert verdicts == {True, False}, "no shape was refused, or none admitted"


def test_nothing_is_decided_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch, calls: list[torch.Size], rows: Rows, unequal: Unequal
) -> None:
    """A graph recorded before the check has our product; the check comes once, with the first call outside."""
    (n, k, m), asked = (1024, 2048, 512), []
    x, weight = rows("normal", m, k), rows("normal", n, k)
    expected = reference(x, weight, None, BF16)

    def ask(*key: object) -> bool:
        asked.append(key)
        return not torch.cuda.is_current_stream_capturing() and proves_equal(*key)

    def recorded() -> int:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = matmul(x, weight, None, BF16)
        out.fill_(torch.nan)
        graph.replay()
        return unequal(out, expected)

    monkeypatch.setattr(linear_plan, "proves_equal", ask)
    ours_into(torch.empty_like(expected), x, weight, None)  # compiles
    assert recorded() == 0
    assert (asked, calls, linear_plan._admitted) == ([], [], {})
    assert unequal(matmul(x, weight, None, BF16), expected) == 0
    assert asked == list(linear_plan._admitted) == [(n, k, m, False, BF16, x.device)]
    assert recorded() == 0
    assert len(asked) == 1


def _in_one_chain(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    matmul_into(out, x, weight, bias)


def _split_in_two(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    half = x.shape[1] // 2
    total = reference(x[:, :half], weight[:, :half], bias, FP32)
    out.copy_(total + reference(x[:, half:], weight[:, half:], None, FP32))


def _rounded_before_the_bias(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(reference(x, weight, None, BF16) if bias is None else reference(x, weight, None, BF16) + bias)


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
    product: Callable[..., None], has_bias: bool, dtype: torch.dtype, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the library's place, another tile of the same chain passes; two chains, or two roundings, do not."""
    monkeypatch.setattr(linear_plan, "_cublas", product)
    assert proves_equal(1024, 1024, 128, has_bias, dtype, DEVICE) is verdict
