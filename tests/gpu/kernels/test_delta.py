"""The gated delta rule's kernels: the CPU's rule, and equal bits however sequences are cut."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from spmd_rl.kernels.delta.dispatch import gated_delta_pass, gated_rms_norm
from spmd_rl.kernels.delta.rule import (
    DeltaHeads,
    DeltaWeights,
    gated_delta,
    plain_gated_norm,
)
from spmd_rl.kernels.delta.states import PackedStates, Places, SlotStates, StateSlots
from tests.unit.kernels.delta.chunked import chunked_gated_delta
from tests.unit.kernels.delta.delta_case import Rows, rows_of, weights_of

DEVICE = torch.device("cuda")
# the second is of no family: its sizes fill no tile
HEADS = [DeltaHeads(16, 32, 128, 128), DeltaHeads(2, 6, 40, 24)]
LENGTHS = [1, 2, 3, 65, 130, 200]


def on_gpu(rows: Rows) -> Rows:
    first, second, third = rows
    return first.to(DEVICE), second.to(DEVICE), third.to(DEVICE)


def joined(parts: Iterable[Rows]) -> Rows:
    qkv, b, a = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return qkv, b, a


def cut(rows: Rows, start: int, count: int) -> Rows:
    qkv, b, a = (one[start : start + count] for one in rows)
    return qkv, b, a


def packed(rows: Rows, weights: DeltaWeights, heads: DeltaHeads, lengths: list[int]) -> Tensor:
    counts = np.array(lengths)
    states = PackedStates(counts, places=Places.of(counts, DEVICE))
    return gated_delta_pass(*rows, weights, heads, states)


@pytest.fixture(params=HEADS, ids=["families", "odd"])
def heads(request: pytest.FixtureRequest) -> DeltaHeads:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_rule_of_a_cpu(heads: DeltaHeads, dtype: torch.dtype) -> None:
    rows, weights = rows_of(heads, sum(LENGTHS), dtype), weights_of(heads, dtype)
    expected, _ = gated_delta(*rows, weights, heads, np.array(LENGTHS))
    out = packed(on_gpu(rows), DeltaWeights(*on_gpu(weights)), heads, LENGTHS).cpu()
    assert (out - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("scratch", [1, 1 << 30])
def test_gradients_are_those_of_the_rule(
    heads: DeltaHeads, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many heads are taken at once."""
    monkeypatch.setattr("spmd_rl.kernels.delta.gradients.SCRATCH", scratch)
    lengths = [1, 70, 30]
    given = [*rows_of(heads, 101, torch.float32), *weights_of(heads)]
    grad = torch.randn(101, heads.values, heads.value_dim)
    ours, theirs = ([one.to(at).requires_grad_() for one in given] for at in (DEVICE, "cpu"))
    qkv, b, a, *weights = ours
    packed((qkv, b, a), DeltaWeights(*weights), heads, lengths).backward(grad.to(DEVICE))
    qkv, b, a, *weights = theirs
    out, _ = gated_delta(qkv, b, a, DeltaWeights(*weights), heads, np.array(lengths))
    out.backward(grad)
    for one, two in zip(ours, theirs, strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad.cpu() - two.grad).norm() <= 5e-5 * two.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_its_bits_in_packs_and_in_slots(
    heads: DeltaHeads, dtype: torch.dtype
) -> None:
    """Cut at any place, beside any others, in slots where others left NaN."""
    weights = DeltaWeights(*on_gpu(weights_of(heads, dtype)))
    whole = [on_gpu(rows_of(heads, length, dtype, length)) for length in LENGTHS]
    alone = [packed(rows, weights, heads, [len(rows[0])]) for rows in whole]
    together = packed(joined(whole), weights, heads, LENGTHS)
    for one, expected in zip(together.split(LENGTHS), alone, strict=True):
        assert torch.equal(one, expected)
    channels = whole[0][0].shape[1]
    arrays = (
        torch.full((9, 3, channels), torch.nan, dtype=dtype, device=DEVICE),
        torch.full((9, heads.values, heads.value_dim, heads.key_dim), torch.nan, device=DEVICE),
    )
    rng, done, ends = np.random.default_rng(0), np.zeros(6, np.int64), np.array(LENGTHS)
    parts: list[list[Tensor]] = [[] for _ in whole]
    while (left := np.flatnonzero(done < ends)).size:
        chosen = left[rng.random(len(left)) < 0.8]
        if not len(chosen):
            continue
        most = rng.choice([1, 1, 40])
        lengths = np.minimum(rng.integers(1, most + 1, len(chosen)), (ends - done)[chosen])
        pairs = list(zip(chosen.tolist(), lengths.tolist(), strict=True))
        qkv, b, a = joined(cut(whole[one], int(done[one]), n) for one, n in pairs)
        slots = StateSlots.of_chunks(chosen + 2, done[chosen], lengths, DEVICE)
        out = gated_delta_pass(qkv, b, a, weights, heads, SlotStates(arrays, slots))
        for (one, _), rows in zip(pairs, out.split(lengths.tolist()), strict=True):
            parts[one].append(rows)
        done[chosen] += lengths
    for one, expected in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(one), expected)
    assert all(one[[0, 1, 8]].isnan().all() for one in arrays), "only its slots are written"


def test_control_the_form_in_chunks_has_other_bits(heads: DeltaHeads) -> None:
    qkv, b, a = on_gpu(rows_of(heads, 200, torch.bfloat16))
    weights = DeltaWeights(*on_gpu(weights_of(heads, torch.bfloat16)))
    out = packed((qkv, b, a), weights, heads, [200])
    chunked = chunked_gated_delta(qkv, b, a, weights, heads, np.array([200]))
    assert (out - chunked).norm() <= 1e-4 * out.norm()
    assert not torch.equal(out, chunked)


def test_gradients_of_bfloat16_are_close(heads: DeltaHeads) -> None:
    """Their products are rounded to the tensor cores' format, as of other libraries."""
    lengths = [1, 70, 230]
    given = [*rows_of(heads, 301, torch.bfloat16), *weights_of(heads, torch.bfloat16)]
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(301, heads.values, heads.value_dim, generator=generator)
    ours = [one.to(DEVICE).requires_grad_() for one in given]
    theirs = [one.float().requires_grad_() for one in given]
    qkv, b, a, *weights = ours
    packed((qkv, b, a), DeltaWeights(*weights), heads, lengths).backward(grad.to(DEVICE))
    qkv, b, a, *weights = theirs
    out, _ = gated_delta(qkv, b, a, DeltaWeights(*weights), heads, np.array(lengths))
    out.backward(grad)
    for one, two in zip(ours[:4], theirs[:4], strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad.cpu().float() - two.grad).norm() <= 1e-2 * two.grad.norm()
    # those of dt_bias and A_log are sums of a token's terms, which nearly cancel
    assert a.grad is not None
    before, of_bias = a.detach() + theirs[4].detach(), a.grad.abs()
    terms = of_bias, of_bias * softplus(before) / before.sigmoid()
    for one, two, of_tokens in zip(ours[4:], theirs[4:], terms, strict=True):
        assert one.grad is not None and two.grad is not None
        assert ((one.grad.cpu().float() - two.grad).abs() <= 1e-2 * of_tokens.sum(0)).all()


@pytest.mark.parametrize("size", [128, 24])
def test_gradients_of_the_norm(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, push = (torch.randn(300, 6, size, generator=generator) for _ in range(3))
    weight = torch.rand(size, generator=generator)
    ours, theirs = (
        [one.to(at).requires_grad_() for one in (x, gate, weight)] for at in (DEVICE, "cpu")
    )
    rows, gates, scale = ours
    gated_rms_norm(rows, gates, scale, 1e-6).backward(push.to(DEVICE))
    rows, gates, scale = theirs
    plain_gated_norm(rows, gates, scale, 1e-6).backward(push)
    for one, two in zip(ours, theirs, strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad.cpu() - two.grad).norm() <= 1e-5 * two.grad.norm()


@pytest.mark.parametrize("size", [128, 24])
def test_the_norm_is_that_of_a_cpu_and_of_each_row_alone(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 6, size, generator=generator)
    gate, weight = torch.randn(37, 6, size, generator=generator).bfloat16(), torch.rand(size)
    rows, gates, scale = on_gpu((x, gate, weight))
    out = gated_rms_norm(rows, gates, scale, 1e-6)
    expected = plain_gated_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=1e-2, atol=1e-6)
    for row in (0, 17, 36):
        alone = gated_rms_norm(rows[row : row + 1], gates[row : row + 1], scale, 1e-6)
        assert torch.equal(alone[0], out[row])
