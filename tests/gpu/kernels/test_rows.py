"""Every op on a GPU gives a row the same bits whatever rows lie beside it.

Matrix products are compared in fp32 accumulators, where a split of K changes nearly every element;
rounded to bf16 it would change one in five hundred. The negative controls at the end are the same
checks on ops that break the contract. They must fail them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import (
    linear,
    linear_fp32,
    rms_norm,
    rope,
    rope_table,
    silu_mul,
    silu_mul_linear,
    token_logprobs,
)
from spmd_rl.kernels.linear.row_shards import RowParallel
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from tests.gpu.kernels.products import shapes, split_in_two

KINDS = ("normal", "wide", "tiny", "cancelling")
ODD = [(100, 72), (37, 100)]  # such as no library likes
SHAPES = [*shapes(), *ODD]
FEW_SHAPES = [*shapes("0.6B"), *ODD]
NUM_TOKENS = 8192
FLOATS = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        *((n, k, "cancelling") for n, k in SHAPES),
        *((*one, kind) for one in FEW_SHAPES for kind in KINDS[:3]),
    ],
)
def test_linear_accumulators(n: int, k: int, kind: str, rows, unequal_rows) -> None:
    weight = rows("normal" if kind == "tiny" else kind, n, k)
    assert unequal_rows(lambda x: linear_fp32(x, weight), rows(kind, NUM_TOKENS, k)) == 0


@pytest.mark.parametrize(
    ("n", "k", "has_bias"),
    [*((n, k, False) for n, k in SHAPES), *((n, k, True) for n, k in FEW_SHAPES)],
)
def test_linear_rounded(n: int, k: int, has_bias: bool, rows, unequal, unequal_rows) -> None:
    weight, x = rows("normal", n, k), rows("normal", NUM_TOKENS, k)
    bias = rows("normal", 1, n)[0] if has_bias else None
    assert unequal_rows(lambda x: linear(x, weight, bias), x) == 0
    accumulators = linear_fp32(x, weight)
    expected = (accumulators if bias is None else accumulators + bias.float()).bfloat16()
    assert unequal(linear(x, weight, bias), expected) == 0


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (1024, 3072)])
def test_parts_of_a_row_parallel_product(n: int, k: int, num_parts: int, rows, unequal) -> None:
    """Ranks that each have one part, and ranks that each have half of them."""
    weight, x = rows("normal", n, k), rows("normal", 512, k)
    whole = RowParallel(num_parts)(x, weight, None)
    columns = zip(x.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True)
    parts = [linear_fp32(a.contiguous(), b.contiguous()) for a, b in columns]
    assert unequal(sum_neighbours(parts).bfloat16(), whole) == 0
    halves = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    own = RowParallel(num_parts // 2)
    first, second = (own.own_sum(a.contiguous(), b.contiguous()) for a, b in halves)
    assert unequal((first + second).bfloat16(), whole) == 0
    for count in (1, 7, 64, 200):
        assert unequal(RowParallel(num_parts)(x[:count], weight, None), whole[:count]) == 0
    assert unequal(linear(x, weight), whole) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1024, 2560, 4096])
def test_head_of_a_large_vocabulary(k: int, kind: str, rows, unequal_rows) -> None:
    weight = rows("normal" if kind == "tiny" else kind, 151936, k)
    assert unequal_rows(lambda x: linear_fp32(x, weight), rows(kind, NUM_TOKENS, k)) == 0


@pytest.mark.parametrize("count", [2, 17, 64, 256, 1000])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_of_nan_stay_where_they_are(n: int, k: int, count: int, rows, unequal) -> None:
    """Every other row is NaN: the rows between keep their bits."""
    weight, x = rows("normal", n, k), rows("normal", count, k)
    poisoned = x.clone()
    poisoned[1::2] = torch.nan
    for op in (linear, linear_fp32, silu_mul_linear)[: 3 if n % 2 == 0 else 2]:
        with torch.no_grad():
            out, beside = op(x, weight), op(poisoned, weight)
        assert unequal(beside[::2], out[::2]) == 0
        assert beside[1::2].isnan().all()


def test_products_fill_more_than_two_to_the_31_elements(rows, unequal) -> None:
    weight, x = rows("normal", 151936, 64), rows("normal", 14400, 64)
    whole = linear_fp32(x, weight)
    assert unequal(whole[-33:], linear_fp32(x[-33:], weight)) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 100, 128, 1024, 2560, 4096, 5120])
def test_norm(columns: int, kind: str, dtype: torch.dtype, rows, unequal_rows) -> None:
    weight = rows("normal", 1, columns, dtype)[0]
    assert (
        unequal_rows(lambda x: rms_norm(x, weight, 1e-6), rows(kind, NUM_TOKENS, columns, dtype))
        == 0
    )


@pytest.mark.parametrize("num_heads", [1, 8, 14, 32])
def test_norm_and_rope_of_heads(num_heads: int, rows, unequal_rows) -> None:
    dim, x = 128, rows("normal", NUM_TOKENS, num_heads * 128)
    weight = rows("normal", 1, dim)[0]
    table = rope_table(1.0 / 1e6 ** (torch.arange(0, dim, 2) / dim), 4096)
    cos, sin = (t[4000].cuda() for t in table)

    def op(x: Tensor) -> Tensor:
        normed = rms_norm(x.unflatten(1, (num_heads, dim)), weight, 1e-6)
        return rope(normed, cos.expand(len(x), -1), sin.expand(len(x), -1)).flatten(1)

    assert unequal_rows(op, x) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [100, 3072])
def test_silu_mul(columns: int, kind: str, rows, unequal_rows) -> None:
    assert unequal_rows(lambda x: silu_mul(x, x), rows(kind, NUM_TOKENS, columns)) == 0


@pytest.mark.parametrize("vocab", [5, 97, 4096, 50257, 151936])
def test_logprobs(vocab: int, rows, unequal_rows) -> None:
    x = rows("normal", NUM_TOKENS, vocab, torch.float32).mul_(3)

    def op(x: Tensor) -> Tensor:
        target = torch.full((len(x),), 3, device="cuda")
        return torch.stack(
            token_logprobs(x, target, torch.full((len(x),), 1.25, device="cuda")), dim=1
        )

    assert unequal_rows(op, x) == 0


def test_control_split_of_k_fails(rows, unequal_rows) -> None:
    weight = rows("normal", 1024, 3072)

    def op(x: Tensor) -> Tensor:
        return split_in_two(x, weight) if len(x) <= 64 else linear_fp32(x, weight)

    assert unequal_rows(op, rows("normal", 256, 3072)) > 100_000


def test_control_cublas_for_few_rows_fails(rows, unequal_rows) -> None:
    weight = rows("normal", 1024, 3072)
    assert unequal_rows(lambda x: F.linear(x, weight), rows("normal", NUM_TOKENS, 3072)) > 0


def test_control_other_warps_fail(monkeypatch: pytest.MonkeyPatch, rows, unequal) -> None:
    x, weight = rows("normal", 4096, 4096, torch.float32), rows("normal", 1, 4096, torch.float32)[0]
    expected = rms_norm(x, weight, 1e-6)
    monkeypatch.setattr("spmd_rl.kernels.rowwise.norm_triton.NUM_WARPS", 8)
    assert unequal(rms_norm(x, weight, 1e-6), expected) > 0


def test_control_norm_with_one_rounding_less_fails(rows, unequal) -> None:
    x, weight = rows("normal", 4096, 1024), rows("normal", 1, 1024)[0]
    wide = x.float()
    fused = (
        wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * weight.float()
    ).bfloat16()
    assert unequal(fused, rms_norm(x, weight, 1e-6)) > 0.1 * x.numel()


def test_control_other_chunk_fails(monkeypatch: pytest.MonkeyPatch, rows, unequal) -> None:
    x = rows("normal", 2048, 50257, torch.float32)
    target, one = torch.full((len(x),), 3, device="cuda"), torch.ones(len(x), device="cuda")
    expected = token_logprobs(x, target, one)[0]
    monkeypatch.setattr("spmd_rl.kernels.vocab.logprob.VOCAB_CHUNK", 512)
    assert unequal(token_logprobs(x, target, one)[0], expected) > 0
