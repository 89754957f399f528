"""Sums of parts of K have the bits of a product of each part, added in the contract's tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.linear import dispatch
from spmd_rl.kernels.linear.cublas import has_reference_bits
from spmd_rl.kernels.linear.cublaslt import Shape, propose_algorithms
from spmd_rl.kernels.linear.dispatch import matmul
from spmd_rl.kernels.linear.row_shards import RowParallel
from spmd_rl.kernels.linear.tiles import REFERENCE, choose_share
from spmd_rl.kernels.runtime.cuda_graph import capture
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.kernels.runtime.versions import has_dsl

if torch.cuda.is_available():
    from spmd_rl.kernels.linear.triton_gemm import matmul_into

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="the kernels were compared on Hopper")
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (1, 7, 16, 64, 200, 2048)
# o and down of 0.6B and 8B, and down of 4B, whose K has few steps in common with its parts
SHAPES = [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 12288), (2560, 9728)]
REPLAYS = 30
Rows = Callable[..., Tensor]
Unequal = Callable[[Tensor, Tensor], int]


def parts_of(x: Tensor, weight: Tensor, num_parts: int) -> list[Tensor]:
    """Return each part's product in fp32: of copies, by one tile, whatever the sizes."""
    sums = []
    for own_x, own_weight in zip(x.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True):
        sums.append(x.new_empty(len(x), len(weight), dtype=FP32))
        matmul_into(sums[-1], own_x.contiguous(), own_weight.contiguous(), None, REFERENCE)
    return sums


def wanted(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, num_parts: int
) -> Tensor:
    total = sum_neighbours(parts_of(x, weight, num_parts))
    return (total if bias is None else total + bias.float()).to(dtype)


@pytest.mark.parametrize(
    ("num_parts", "has_bias", "dtype"),
    [(1, True, BF16), (2, True, BF16), (2, False, FP32), (4, False, BF16), (8, True, FP32)],
)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_sum_in_parts_has_the_bits_of_the_tree(
    n: int, k: int, num_parts: int, has_bias: bool, dtype: torch.dtype, rows: Rows, unequal: Unequal
) -> None:
    weight = rows("normal", n, k)
    bias = rows("normal", 1, n)[0] if has_bias else None
    for kind in ("normal", "cancelling"):
        x = rows(kind, max(ROWS), k)
        expected = wanted(x, weight, bias, dtype, num_parts)
        for count in ROWS:
            found = RowParallel(num_parts).own_sum(x[:count], weight, bias, dtype)
            assert unequal(found, expected[:count]) == 0


@pytest.mark.parametrize(("num_parts", "dtype"), [(2, BF16), (8, FP32)])
@pytest.mark.parametrize(("n", "k"), SHAPES[:3])
def test_every_way_has_the_same_bits(
    n: int, k: int, num_parts: int, dtype: torch.dtype, rows: Rows, unequal: Unequal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In one kernel that reads early, in one of tiles, and part by part."""
    x, weight = rows("cancelling", max(ROWS), k), rows("normal", n, k)
    bias = rows("normal", 1, n)[0]
    expected = wanted(x, weight, bias, dtype, num_parts)

    def unequal_ways() -> list[int]:
        found = [(count, matmul(x[:count], weight, bias, dtype, num_parts)) for count in ROWS]
        return [count for count, one in found if unequal(one, expected[:count])]

    assert unequal_ways() == []
    monkeypatch.setattr(dispatch, "_may_be_early", lambda weight: False)
    monkeypatch.setattr(dispatch, "_is_one_kernel", lambda *sizes: True)
    assert unequal_ways() == []
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_is_one_kernel", lambda *sizes: False)
    assert unequal_ways() == []


@pytest.mark.skipif(not has_dsl(), reason="pip install -e '.[gpu]'")
@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_shares_have_the_bits_of_the_tree_before_they_round(
    num_parts: int, rows: Rows, unequal: Unequal
) -> None:
    """With and without clusters; runs round what they sum."""
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    n, k = SHAPES[3]
    x, weight = rows("cancelling", 200, k), rows("normal", n, k)
    expected = wanted(x, weight, None, FP32, num_parts)
    for count in (7, 64, 200):
        share = choose_share(count, n, k)
        assert share is not None
        assert k // num_parts % share.k == 0
        out = x.new_empty(count, n, dtype=FP32)
        shared_matmul_into(out, x[:count], weight, None, share, chains=num_parts)
        assert unequal(out, expected[:count]) == 0


@pytest.mark.parametrize("count", [16, 200, 2048])
def test_control_another_tree_fails(count: int, rows: Rows, unequal: Unequal) -> None:
    x, weight = rows("normal", count, 3072), rows("normal", 1024, 3072)
    found = RowParallel(4).own_sum(x, weight)
    first, *others = parts_of(x, weight, 4)
    assert unequal(found, sum(others, first)) > 0.05 * found.numel()
    for num_parts in (1, 2, 8):
        assert unequal(found, RowParallel(num_parts).own_sum(x, weight)) > 0.05 * found.numel()


@pytest.mark.parametrize(("n", "k"), SHAPES[1:3])
def test_columns_of_wider_matrices_are_multiplied_as_copies_are(
    n: int, k: int, rows: Rows, unequal: Unequal
) -> None:
    """Of both operands, and of one of them."""
    x, weight = (rows("normal", count, 2 * k).chunk(2, 1)[1] for count in (max(ROWS), n))
    copies = x.contiguous(), weight.contiguous()
    assert not (x.is_contiguous() or weight.is_contiguous())
    for count in ROWS:
        for dtype in (BF16, FP32):
            expected = matmul(copies[0][:count], copies[1], None, dtype)
            for left, right in ((x, weight), (copies[0], weight), (x, copies[1])):
                assert unequal(matmul(left[:count], right, None, dtype), expected) == 0


def test_no_weight_is_copied(monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    copied = []

    def dense(given: Tensor) -> Tensor:
        copied.append(given.shape)
        return given.contiguous()

    monkeypatch.setattr(dispatch, "dense", dense)
    monkeypatch.setattr("spmd_rl.kernels.runtime.padding.dense", dense)
    x, weight = rows("normal", max(ROWS), 3072), rows("normal", 1024, 3072)
    for count in ROWS:
        for num_parts in (2, 4, 8):
            RowParallel(num_parts).own_sum(x[:count], weight)
    strided = [one for one in copied if one[1] != 3072]
    assert strided == []
    matmul(x[:7, :104], weight[:, 4:108], None, BF16)  # control: columns that are not aligned
    assert torch.Size([1024, 104]) in copied


@pytest.mark.parametrize("k", [1024, 1536])
def test_all_ways_of_cublas_for_columns_have_the_bits(k: int) -> None:
    """What they are compared with is the reference kernel's product of the same columns."""
    shapes = [Shape(1024, k, m, False, FP32, torch.device("cuda"), 2 * k) for m in (128, 512, 2048)]
    for shape in shapes:
        ways = propose_algorithms(shape)
        assert ways
        assert all(has_reference_bits(way, shape) for way in ways)


@pytest.mark.parametrize("num_parts", [2, 8])
@pytest.mark.parametrize(("count", "width"), [(1, 2048), (16, 2048), (64, 4096)])
def test_recorded_products_have_the_bits_of_eager_ones(
    count: int, width: int, num_parts: int, rows: Rows, unequal: Unequal
) -> None:
    """Replays follow each other at once, and weights change between groups of them."""
    weights = [rows("normal", width, width + 8 * i)[:, :width] / width**0.5 for i in range(8)]
    weights = [one.contiguous() for one in weights]
    x, product = rows("normal", count, width), RowParallel(num_parts)

    def chain(first: Tensor) -> list[Tensor]:
        outs = [first]
        for weight in weights:
            outs.append(product(outs[-1], weight, None))
        return outs[1:]

    with torch.no_grad():
        chain(x)
        graph, outs = capture(partial(chain, x), torch.cuda.graph_pool_handle())
        for turn in range(4):
            x.copy_(torch.randn_like(x))
            for weight in weights:
                weight.mul_(-1.0 if turn % 2 else 2.0)
            differ = torch.zeros((), device="cuda", dtype=torch.int64)
            expected = [one.clone() for one in chain(x)]
            for _ in range(REPLAYS):
                for _ in range(3):
                    graph.replay()
                for found, one in zip(outs, expected, strict=True):
                    differ += (found.view(torch.int16) != one.view(torch.int16)).sum()
            assert differ.item() == 0
            assert unequal(outs[0], wanted(x, weights[0], None, BF16, num_parts)) == 0
