"""Cases of a layer's ops between its products, beside torch's version of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.cases import Case, bf16
from benchmarks.shapes import HEAD_DIM, QWEN3
from spmd_rl.kernels import (
    KvSlots,
    QkNorm,
    Rotary,
    add_rms_norm,
    embed,
    qk_norm_rope,
    qk_norm_rope_into,
    rms_norm,
    rope_table,
    silu_mul,
    write_kv,
)
from spmd_rl.kernels.attention.merge_states import merge_states
from spmd_rl.kernels.linear.adapters import add_adapters

EPS = 1e-6
PAGE_SIZE = 128


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def of_model(name: str, rows: int) -> Iterator[Case]:
    hidden, inner = QWEN3[name][:2]
    weight = torch.ones(hidden, device="cuda").bfloat16()

    def torch_add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return F.rms_norm(summed, (hidden,), weight, EPS), summed

    where = f"Qwen3-{name}, {rows} rows"
    row = 2 * rows
    yield Case(
        f"{where}: embed",
        embed,
        lambda ids, table: table[ids],
        lambda: (torch.randperm(rows, device="cuda"), bf16(rows, hidden)),
        2 * row * hidden,
    )
    yield Case(
        f"{where}: rms_norm",
        lambda x: rms_norm(x, weight, EPS),
        lambda x: F.rms_norm(x, (hidden,), weight, EPS),
        lambda: (bf16(rows, hidden),),
        2 * row * hidden,
    )
    yield Case(
        f"{where}: add_rms_norm",
        lambda x, residual: add_rms_norm(x, residual, weight, EPS),
        torch_add_norm,
        lambda: (bf16(rows, hidden), bf16(rows, hidden)),
        4 * row * hidden,
    )
    yield Case(
        f"{where}: silu_mul",
        silu_mul,
        lambda gate, up: F.silu(gate) * up,
        lambda: (bf16(rows, inner), bf16(rows, inner)),
        3 * row * inner,
    )


def of_adapters(name: str, rows: int, rank: int = 16) -> Iterator[Case]:
    """Yield what adapters add to the gate and up projections, which share a product."""
    hidden, inner = QWEN3[name][:2]
    down, up = bf16(2 * rank, hidden), bf16(2 * inner, rank)

    def ours(product: Tensor, x: Tensor) -> Tensor:
        return add_adapters(product, x, down, up, 2.0, (inner, inner))[0]

    def theirs(product: Tensor, x: Tensor) -> Tensor:
        lows = (F.linear(x, down) * 2.0).split(rank, 1)
        parts = zip(lows, up.split(inner), strict=True)
        return product + torch.cat([F.linear(low, one) for low, one in parts], 1)

    yield Case(
        f"Qwen3-{name}, {rows} rows: add_adapters",
        ours,
        theirs,
        lambda: (bf16(rows, 2 * inner), bf16(rows, hidden)),
        2 * (rows * (4 * inner + hidden) + 2 * rank * (hidden + inner)),
    )


def of_heads(name: str, rows: int) -> Iterator[Case]:
    heads, kv_heads = QWEN3[name][3:5]
    weight = torch.ones(HEAD_DIM, device="cuda").bfloat16()
    table = [one.cuda() for one in rope_table(1e6 ** -torch.arange(0, 1, 2 / HEAD_DIM), 4096)]
    positions, slots = torch.randint(4096, (rows,), device="cuda"), some_slots(rows)
    norm, rotary = QkNorm(weight, weight, EPS), Rotary(positions, *table)
    wide_table = [torch.cat([one, one], dim=1).bfloat16() for one in table]

    def torch_qk(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (one[positions].unsqueeze(1) for one in wide_table)
        q, k = (F.rms_norm(x, (HEAD_DIM,), weight, EPS) for x in (q, k))
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def own_matmul_into(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return qk_norm_rope_into(q, k, v, norm, rotary, KvSlots(keys, values, slots))

    def torch_into(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k = torch_qk(q, k)
        torch_write(keys, values, slots, k, v)
        return q

    where = f"Qwen3-{name}, {rows} rows"
    q_shape, k_shape = (rows, heads, HEAD_DIM), (rows, kv_heads, HEAD_DIM)
    yield Case(
        f"{where}: qk_norm_rope",
        lambda q, k: qk_norm_rope(q, k, norm, rotary),
        torch_qk,
        lambda: (bf16(*q_shape), bf16(*k_shape)),
        2 * 2 * rows * (heads + kv_heads) * HEAD_DIM,
    )
    yield Case(
        f"{where}: qk_norm_rope_into",
        own_matmul_into,
        torch_into,
        lambda: (bf16(*q_shape), bf16(*k_shape), bf16(*k_shape), *some_pages(rows, kv_heads)),
        2 * 2 * rows * (heads + 2 * kv_heads) * HEAD_DIM,
    )


def some_slots(rows: int) -> Tensor:
    return torch.randperm(rows * 4, device="cuda")[:rows]


def some_pages(rows: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of as many tokens as `some_slots` chooses from."""
    shape = (4 * rows // PAGE_SIZE, PAGE_SIZE, kv_heads, HEAD_DIM)
    return bf16(*shape), bf16(*shape)


def torch_write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    keys.flatten(0, 1).index_copy_(0, slots, k)
    values.flatten(0, 1).index_copy_(0, slots, v)


def of_cache(rows: int, kv_heads: int = 8) -> Iterator[Case]:
    slots = some_slots(rows)
    yield Case(
        f"{rows} rows of 8 heads: write_kv",
        lambda keys, values, k, v: write_kv(keys, values, slots, k, v),
        lambda keys, values, k, v: torch_write(keys, values, slots, k, v),
        lambda: (
            *some_pages(rows, kv_heads),
            bf16(rows, kv_heads, HEAD_DIM),
            bf16(rows, kv_heads, HEAD_DIM),
        ),
        4 * 2 * rows * kv_heads * HEAD_DIM,
    )


def of_splits(rows: int, count: int = 8, heads: int = 32) -> Iterator[Case]:
    where = torch.arange(rows * count, device="cuda").view(rows, count)
    out = bf16(rows, heads, HEAD_DIM)

    def torch_merge(partial: Tensor, log_sum: Tensor) -> Tensor:
        weights = log_sum.view(rows, count, heads, 1).softmax(1)
        return (partial.view(rows, count, heads, HEAD_DIM).float() * weights).sum(1).bfloat16()

    yield Case(
        f"{rows} rows of {heads} heads in {count} splits: merge_ranges",
        lambda partial, log_sum: merge_states(partial, log_sum, where, out),
        torch_merge,
        lambda: (
            bf16(rows * count, heads, HEAD_DIM),
            torch.randn(rows * count, heads, device="cuda"),
        ),
        2 * rows * (count + 1) * heads * HEAD_DIM,
    )
