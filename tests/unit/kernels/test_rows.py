"""Every op gives a row the same bits whatever rows lie beside it, and agrees with float64.

The negative controls at the end are the same checks on ops that break the contract. They must fail
them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import (
    KvSlots,
    QkNorm,
    Rotary,
    add_rms_norm,
    linear,
    qk_norm_rope,
    qk_norm_rope_into,
    rms_norm,
    rope,
    rope_table,
    silu_mul,
    token_logprobs,
    write_kv,
)
from spmd_rl.kernels.linear import cpu
from tests.libraries import other_sums_of_few_rows

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 257)
TOTAL = 300
RowOp = Callable[[Tensor], Tensor]


def data(kind: str, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "wide":
        return x * torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float())
    if kind == "cancelling":
        signs = torch.where(torch.arange(columns) % 2 == 0, 1024.0, -1024.0)
        return signs + x * 2**-15
    return x


def unequal_rows(op: RowOp, x: Tensor) -> int:
    """Count rows whose bits change with the rows beside them, over many counts and offsets."""
    whole, count = op(x), 0
    for rows in ROWS:
        for first in (0, 1, 5, TOTAL - rows):
            part = op(x[first : first + rows].clone())
            count += int(
                (part.view(torch.int32) != whole[first : first + rows].view(torch.int32)).sum()
            )
    return count


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


SHAPES = [
    (64, 192),
    (128, 32),
    (192, 64),
    (64, 20),
    (48, 97),
    (256, 1024),
    (1024, 256),
    (13, 7),
    (97, 3),
    (6, 11),
]
KINDS = ("normal", "wide", "cancelling")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_linear(k: int, n: int, kind: str) -> None:
    w, bias = weight(n, k), weight(1, n)[0]
    assert unequal_rows(lambda x: linear(x, w, bias), data(kind, TOTAL, k)) == 0


def test_linear_where_tiles_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a library splits K by the number of tiles, each tile is multiplied by itself."""
    sizes: list[int] = []

    def by_parts(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(len(x))
        parts = zip(x.chunk(len(x) // 16, 1), w.chunk(len(x) // 16, 1), strict=True)
        total = sum(part @ columns.t() for part, columns in parts)
        return total if bias is None else total + bias

    plain, given = F.linear, (weight(48, 97), weight(1, 48)[0])
    x = data("normal", TOTAL, 97)
    monkeypatch.setattr(cpu.F, "linear", by_parts)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "rows_are_independent", lambda *shape: True)
        assert unequal_rows(lambda part: linear(part, *given), x) > 0, "the control"
    cpu.rows_are_independent.cache_clear()
    sizes.clear()
    assert unequal_rows(lambda part: linear(part, *given), x) == 0
    assert set(sizes) == {16, 32}, "all but the comparison's are tiles"
    torch.testing.assert_close(linear(x, *given), plain(x, *given), rtol=1e-4, atol=1e-4)
    cpu.rows_are_independent.cache_clear()


def test_control_a_library_of_other_sums_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = data("normal", TOTAL, 64), weight(64, 64)
    monkeypatch.setattr(cpu.F, "linear", other_sums_of_few_rows)
    assert unequal_rows(lambda part: linear(part, w), x) == 0
    monkeypatch.setattr(cpu, "pad_rows", lambda x: x)
    assert unequal_rows(lambda part: linear(part, w), x) > 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 110), st.integers(1, 15), st.booleans())
def test_a_row_has_its_bits_at_any_place_in_its_tile(n: int, k: int, by: int, wide: bool) -> None:
    x, w = data("wide" if wide else "normal", 32, k), weight(n, k)
    assert torch.equal(linear(x.roll(by, 0), w).roll(-by, 0), linear(x, w))


def test_control_a_library_that_counts_places_where_k_is_no_multiple_of_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x, w = F.linear, data("normal", TOTAL, 13), weight(7, 13)

    def by_place(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        out = plain(x, w, bias)
        if x.shape[1] % 4:
            out[1::2] = plain(x.flip(1), w.flip(1), bias)[1::2]
        return out

    monkeypatch.setattr(cpu.F, "linear", by_place)
    assert unequal_rows(lambda part: linear(part, w), x) == 0
    monkeypatch.setattr(cpu, "pad_columns", lambda x: x)
    assert unequal_rows(lambda part: linear(part, w), x) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_is_compared_once_a_shape(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.rows_are_independent.cache_clear()
    for _ in range(3):
        linear(data("normal", 40, 64).to(dtype), weight(32, 64).to(dtype))
    found = cpu.rows_are_independent.cache_info()
    assert (found.misses, found.hits) == (1, 2)
    x = data("normal", 256, 64).to(dtype).requires_grad_()
    linear(x, weight(32, 64).to(dtype)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("n", "k", "dtype", "large"),
    [
        *((32, 64, dtype, cpu.LARGE) for dtype in (torch.float32, torch.bfloat16)),
        *((4, 16, dtype, cpu.LARGE) for dtype in (torch.float32, torch.bfloat16)),
        *((512, 200, dtype, cpu.LARGE) for dtype in (torch.float32, torch.bfloat16)),
        (4, 16, torch.bfloat16, 1.0),
    ],
)
def test_the_comparison_sees_two_sums_in_place_of_one(
    n: int, k: int, dtype: torch.dtype, large: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where tall products are cut along K: most elements differ, also after rounding.

    The control is a small product without large numbers: rounding to bfloat16 hides the cut.
    """
    plain = F.linear

    def summed(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        whole = plain(x.float(), w.float())
        if len(x) > cpu.ROW_TILE:
            left = plain(x[:, : k // 3].float(), w[:, : k // 3].float())
            whole = left + plain(x[:, k // 3 :].float(), w[:, k // 3 :].float())
        return whole.to(x.dtype)

    monkeypatch.setattr(cpu.F, "linear", summed)
    monkeypatch.setattr(cpu, "LARGE", large)
    check = cpu.rows_are_independent.__wrapped__
    assert check(n, k, False, dtype, torch.get_num_threads()) == (large == 1.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_linear_with_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        w = weight(1024, 256)
        assert unequal_rows(lambda x: linear(x, w), data("normal", TOTAL, 256)) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [16, 20, 64, 100, 128, 1024])
def test_row_wise_ops(columns: int, kind: str) -> None:
    x = data(kind, TOTAL, columns)
    scale = weight(1, columns)[0]
    cos, sin = rope_table(1.0 / 10000 ** (torch.arange(0, columns, 2) / columns), 8)
    one = torch.ones(TOTAL)
    ops: dict[str, RowOp] = {
        "rms_norm": lambda x: rms_norm(x, scale, 1e-6),
        "add_rms_norm": lambda x: torch.stack(add_rms_norm(x, x.flip(1), scale, 1e-6), 1),
        "qk_norm_rope": lambda x: torch.stack(
            qk_norm_rope(
                *(x.unsqueeze(1), x.flip(1).unsqueeze(1)),
                QkNorm(scale, scale, 1e-6),
                Rotary(torch.full((len(x),), 5), cos, sin),
            )
        ).transpose(0, 1),
        "silu_mul": lambda x: silu_mul(x, x),
        "silu_mul of halves": lambda x: silu_mul(*torch.cat([x, x.flip(1)], 1).chunk(2, 1)),
        "rope": lambda x: rope(
            x.unsqueeze(1), cos[5].expand(len(x), -1), sin[5].expand(len(x), -1)
        ).squeeze(1),
        "logprob": lambda x: token_logprobs(x, torch.full((len(x),), 3), one[: len(x)])[0],
        "entropy": lambda x: token_logprobs(x, torch.full((len(x),), 3), one[: len(x)])[1],
    }
    assert {name: unequal_rows(op, x) for name, op in ops.items()} == dict.fromkeys(ops, 0)


@pytest.mark.parametrize("columns", [5, 97, 8200, 20000])
def test_logprob_of_any_vocabulary(columns: int) -> None:
    x = data("normal", 24, columns)
    targets = torch.arange(24) % columns
    whole = token_logprobs(x, targets, torch.full((24,), 1.25))[0]
    for row in range(24):
        assert torch.equal(
            token_logprobs(x[row : row + 1], targets[row : row + 1], torch.tensor([1.25]))[0][0],
            whole[row],
        )
    expected = (x.double() * 1.25).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=2e-6)


def test_padding_of_linear_is_invisible() -> None:
    w = weight(64, 64)
    x = data("normal", 5, 64)
    torch.testing.assert_close(
        linear(x, w).double(), x.double() @ w.double().t(), rtol=1e-5, atol=1e-5
    )


TABLE = rope_table(torch.tensor([1.0, 0.3, 0.1]), 9)
GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, w: rms_norm(x, w[0, :12], 1e-6),
    "add_rms_norm": lambda x, w: torch.cat(add_rms_norm(x, w[:9, 2:14], w[0, :12], 1e-6), 1),
    "qk_norm_rope": lambda x, w: torch.cat(
        qk_norm_rope(
            x[:, :6].view(9, 1, 6),
            x[:, 6:].view(9, 1, 6),
            QkNorm(w[0, :6], w[1, :6], 1e-6),
            Rotary(torch.arange(9), *TABLE),
        ),
        1,
    ),
    "silu_mul": lambda x, w: silu_mul(x, w[:9, :12]),
    "linear": lambda x, w: linear(x, w[:, :12]),
    "logprob": lambda x, w: token_logprobs(x, torch.arange(9), w[:9, 0].abs() + 0.5)[0],
    "rope": lambda x, w: rope(x.view(9, 2, 6), *TABLE),
}
ORACLES: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, w: _norm(x, w[0, :12]),
    "add_rms_norm": lambda x, w: torch.cat([_norm(x + w[:9, 2:14], w[0, :12]), x + w[:9, 2:14]], 1),
    "qk_norm_rope": lambda x, w: _complex_rope(
        torch.stack([_norm(x[:, :6], w[0, :6]), _norm(x[:, 6:], w[1, :6])], 1)
    ),
    "silu_mul": lambda x, w: F.silu(x) * w[:9, :12],
    "linear": lambda x, w: x @ w[:, :12].t(),
    "logprob": lambda x, w: (x * (w[:9, :1].abs() + 0.5)).log_softmax(-1)[
        torch.arange(9), torch.arange(9)
    ],
    "rope": lambda x, w: _complex_rope(x.view(9, 2, 6)),
}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _complex_rope(x: Tensor) -> Tensor:
    angles = torch.outer(
        torch.arange(9.0, dtype=x.dtype), torch.tensor([1.0, 0.3, 0.1], dtype=x.dtype)
    )
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("name", GRADIENTS)
def test_forward_and_gradients_against_float64(name: str) -> None:
    x, w = data("normal", 9, 12), weight(16, 16)
    results = []
    for op, dtype in ((GRADIENTS[name], torch.float32), (ORACLES[name], torch.float64)):
        leaf, other = (
            x.to(dtype, copy=True).requires_grad_(),
            w.to(dtype, copy=True).requires_grad_(name != "logprob"),
        )
        out = op(leaf, other)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        results.append(
            [out.double(), leaf.grad.double()]
            + ([other.grad.double()] if other.grad is not None else [])
        )
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


def test_keys_and_values_go_to_their_slots() -> None:
    joint = data("normal", 5, 3 * 8).view(5, 3, 8)
    cache = torch.zeros(2, 4, 16, 1, 8)
    write_kv(cache[0], cache[1], torch.tensor([3, -1, 40, 16]), joint[:, 1:2], joint[:, 2:])
    flat = cache.flatten(1, 3)
    assert torch.equal(flat[:, [3, 40, 16]], joint[[0, 2, 3], 1:].transpose(0, 1))
    assert flat.count_nonzero() == 2 * 3 * 8


def test_turned_keys_go_to_their_slots() -> None:
    q, k, v = data("normal", 5, 3 * 6).view(5, 3, 6).split(1, 1)
    rest = QkNorm(weight(1, 6)[0], weight(2, 6)[1], 1e-6), Rotary(torch.arange(5), *TABLE)
    place = KvSlots(*torch.zeros(2, 4, 16, 1, 6), torch.tensor([3, -1, 40, 16]))
    turned, keys = qk_norm_rope(q, k, *rest)
    assert torch.equal(qk_norm_rope_into(q, k, v, *rest, place), turned)
    assert torch.equal(place.keys.flatten(0, 1)[[3, 40, 16]], keys[[0, 2, 3]])
    assert torch.equal(place.values.flatten(0, 1)[[3, 40, 16]], v[[0, 2, 3]])


def test_operands_of_other_numbers_of_rows_are_refused() -> None:
    """Otherwise a kernel would read beyond the shorter operand."""
    x, weight = torch.ones(16, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"a sum of \[16, 8\] and \[1, 8\]"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    q, table = torch.ones(16, 2, 8), torch.ones(20, 4)
    for keys, positions in (16, 1), (1, 16), (17, 16):
        k, at = torch.ones(keys, 1, 8), torch.zeros(positions, dtype=torch.int64)
        rest = QkNorm(weight, weight, 1e-6), Rotary(at, table, table)
        with pytest.raises(
            ValueError, match=f"16 queries and {keys} keys at {positions} positions"
        ):
            qk_norm_rope(q, k, *rest)
        with pytest.raises(
            ValueError, match=f"16 queries and {keys} keys at {positions} positions"
        ):
            qk_norm_rope_into(q, k, k, *rest, KvSlots(table, table, at))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("another exponential at the end of a buffer", lambda x: _exp_in_eights(x[:, :60])),
        ("split sum chosen by the number of rows", lambda x: _split_sum(x)),
        ("norm over the batch", lambda x: x / x.square().mean().sqrt()),
    ],
)
def test_negative_controls_fail(name: str, op: RowOp) -> None:
    assert unequal_rows(op, data("normal", TOTAL, 64)) > 0, name


def _exp_in_eights(x: Tensor) -> Tensor:
    """Take exp in eight lanes, with another function for the remainder, as CPUs may."""
    flat = x.reshape(-1)
    whole = len(flat) // 8 * 8
    return torch.cat([flat[:whole].exp(), 1 / (-flat[whole:]).exp()]).view_as(x)


def _split_sum(x: Tensor) -> Tensor:
    if len(x) < 64:
        return x.sum(-1, keepdim=True)
    half = x.shape[1] // 2
    return x[:, :half].sum(-1, keepdim=True) + x[:, half:].sum(-1, keepdim=True)
