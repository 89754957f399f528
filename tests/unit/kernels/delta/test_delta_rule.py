"""The gated delta rule: equal bits however a sequence is cut, and transformers' arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from spmd_rl.kernels.delta.rule import (
    ConvRows,
    DeltaHeads,
    DeltaStates,
    DeltaSteps,
    DeltaWeights,
    causal_conv,
    gated_delta,
    plain_gated_norm,
    recurrence,
)
from tests.unit.kernels.delta.chunked import chunked_gated_delta
from tests.unit.kernels.delta.delta_case import Rows, rows_of, weights_of

# the second has sizes that fill no vector of the processor
HEADS = [DeltaHeads(2, 4, 16, 32), DeltaHeads(1, 3, 7, 5)]
DTYPES = [torch.float32, torch.bfloat16]


def alone(rows: Rows, weights: DeltaWeights, heads: DeltaHeads) -> Tensor:
    """The rows of a sequence from its first token on."""
    return gated_delta(*rows, weights, heads, np.array([len(rows[0])]))[0]


def mix(rows: Rows, heads: DeltaHeads) -> Tensor:
    return alone(rows, weights_of(heads, rows[0].dtype), heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_sequences_have_their_bits_in_any_batch_and_chunks(
    heads: DeltaHeads, dtype: torch.dtype
) -> None:
    """Of several sequences, each cut at other places, and each with its states handed on."""
    weights, rng = weights_of(heads, dtype), np.random.default_rng(3)
    whole = [rows_of(heads, length, dtype, length) for length in (1, 2, 3, 9, 30, 31)]
    expected = [alone(rows, weights, heads) for rows in whole]
    done = np.zeros(len(whole), np.int64)
    states = DeltaStates(
        torch.zeros(len(whole), 3, whole[0][0].shape[1], dtype=dtype),
        torch.zeros(len(whole), heads.values, heads.value_dim, heads.key_dim),
    )
    parts: list[list[Tensor]] = [[] for _ in whole]
    ends = np.array([len(rows[0]) for rows in whole])
    while (left := np.flatnonzero(done < ends)).size:
        chosen = left[rng.random(len(left)) < 0.7]
        lengths = np.minimum(rng.integers(1, 8, len(chosen)), (ends - done)[chosen])
        if not len(chosen):
            continue
        new = [
            torch.cat(
                [
                    whole[one][kind][done[one] : done[one] + n]
                    for one, n in zip(chosen, lengths, strict=True)
                ]
            )
            for kind in range(3)
        ]
        begin = DeltaStates(*(one[chosen] for one in states))
        out, after = gated_delta(*new, weights, heads, lengths, begin)
        for kept, one in zip(states, after, strict=True):
            kept[chosen] = one
        for one, rows in zip(chosen, out.split(lengths.tolist()), strict=True):
            parts[one].append(rows)
        done[chosen] += lengths
    for one, rows in zip(parts, expected, strict=True):
        assert torch.equal(torch.cat(one), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_row_has_its_bits_whatever_follows(heads: DeltaHeads, dtype: torch.dtype) -> None:
    rows = rows_of(heads, 37, dtype)
    whole = mix(rows, heads)
    for length in range(1, 37):
        start = tuple(one[:length] for one in rows)
        assert torch.equal(mix(start, heads), whole[:length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_norm_gives_a_row_its_bits_alone(heads: DeltaHeads, dtype: torch.dtype) -> None:
    x = mix(rows_of(heads, 19, dtype), heads)
    gate = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    weight = torch.linspace(0.5, 1.5, heads.value_dim).to(dtype)
    whole = plain_gated_norm(x, gate, weight, 1e-6)
    assert whole.dtype == dtype
    for start in range(19):
        for stop in (start + 1, 19):
            part = plain_gated_norm(x[start:stop], gate[start:stop], weight, 1e-6)
            assert torch.equal(part, whole[start:stop])
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    expected = normed * weight.double() * F.silu(gate.double())
    torch.testing.assert_close(whole, expected.to(dtype))


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_transformers_rule(heads: DeltaHeads) -> None:
    """Outputs and gradients of all that is learned or handed on."""
    generator = torch.Generator().manual_seed(1)
    given = [*rows_of(heads, 23, torch.float32), *weights_of(heads)]
    ours, theirs = ([one.clone().requires_grad_() for one in given] for _ in range(2))
    out = alone(tuple(ours[:3]), DeltaWeights(*ours[3:]), heads)
    expected = _by_transformers(theirs, heads)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    expected.backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert (mine.grad - other.grad).norm() <= 2e-5 * other.grad.norm()


def _by_transformers(given: list[Tensor], heads: DeltaHeads) -> Tensor:
    qkv, b, a, conv, dt_bias, a_log = given
    mixed = F.silu(F.conv1d(qkv.T[None], conv, padding=3, groups=len(conv)))[0, :, : len(qkv)].T
    width, served = heads.keys * heads.key_dim, heads.values // heads.keys
    q, k, v = mixed.split([width, width, heads.values * heads.value_dim], -1)
    q, k = (
        one.unflatten(-1, (heads.keys, -1)).repeat_interleave(served, 1)[None] for one in (q, k)
    )
    g = -a_log.exp() * F.softplus(a + dt_bias)
    values = v.unflatten(-1, (heads.values, -1))[None]
    out, _ = torch_recurrent_gated_delta_rule(
        q, k, values, g=g[None], beta=b.sigmoid()[None], use_qk_l2norm_in_kernel=True
    )
    return out[0]


def test_it_is_close_to_float64() -> None:
    heads = HEADS[0]
    rows, weights = rows_of(heads, 200, torch.float32), weights_of(heads)
    out = alone(rows, weights, heads)
    exact = _in_float64(rows, weights, heads)
    assert (out - exact).norm() <= 2e-6 * exact.norm()


def _in_float64(rows: Rows, weights: DeltaWeights, heads: DeltaHeads) -> Tensor:
    """The rule of torch's own operations, with einsum."""
    qkv, b, a = (one.double() for one in rows)
    conv, dt_bias, a_log = (one.double() for one in weights)
    mixed = F.silu(F.conv1d(qkv.T[None], conv, padding=3, groups=len(conv)))[0, :, : len(qkv)].T
    width, served = heads.keys * heads.key_dim, heads.values // heads.keys
    q, k, v = mixed.split([width, width, heads.values * heads.value_dim], -1)
    q, k = (one.unflatten(-1, (heads.keys, -1)).repeat_interleave(served, 1) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    v, decay = v.unflatten(-1, (heads.values, -1)), (-a_log.exp() * F.softplus(a + dt_bias)).exp()
    state = torch.zeros(heads.values, heads.key_dim, heads.value_dim, dtype=torch.float64)
    out = []
    for token in range(len(qkv)):
        state = state * decay[token, :, None, None]
        delta = v[token] - torch.einsum("hij,hi->hj", state, k[token])
        state = state + torch.einsum("hi,hj,h->hij", k[token], delta, b[token].sigmoid())
        out.append(torch.einsum("hij,hi->hj", state, q[token]) * heads.key_dim**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("size", [1e3, -1e3, 0.0])
def test_extreme_rows_have_finite_gradients(size: float) -> None:
    heads = HEADS[0]
    rows = [torch.full_like(one, size).requires_grad_() for one in rows_of(heads, 5, torch.float32)]
    out = alone(tuple(rows), weights_of(heads), heads)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in rows)


def test_the_convolution_reads_the_last_four_tokens() -> None:
    x = torch.zeros(9, 3)
    x[2, 1] = 1.0
    rows = ConvRows(x, np.array([9]), None, 3)
    out = causal_conv(rows, torch.ones(3, 1, 4))
    assert torch.equal(rows.last()[0], x[-3:])
    changed = out.nonzero()
    assert changed[:, 0].tolist() == [2, 3, 4, 5] and set(changed[:, 1].tolist()) == {1}


def test_a_state_in_bfloat16_would_be_another_rule() -> None:
    """A negative control: the state keeps what its smaller form would lose."""
    ones = torch.ones(1, 1, 1)
    q = k = ones.expand(2, 1, 1)
    v = torch.tensor([1.0, 1.0 + 2**-12]).view(2, 1, 1)
    steps = DeltaSteps(q, k, v, torch.zeros(2, 1), torch.ones(2, 1))
    out, _ = recurrence(steps, np.array([2]), torch.zeros(1, 1, 1, 1))
    assert torch.equal(out, v)
    assert not torch.equal(out.bfloat16().float(), v)


@pytest.mark.parametrize("heads", HEADS)
def test_the_form_in_chunks_is_the_same_rule(heads: DeltaHeads) -> None:
    """Outputs and gradients of several sequences. Its bits differ."""
    lengths = np.array([1, 150, 64, 7])
    given = [*rows_of(heads, int(lengths.sum()), torch.float32), *weights_of(heads)]
    ours, chunked = ([one.clone().requires_grad_() for one in given] for _ in range(2))
    out, _ = gated_delta(*ours[:3], DeltaWeights(*ours[3:]), heads, lengths)
    other = chunked_gated_delta(*chunked[:3], DeltaWeights(*chunked[3:]), heads, lengths)
    assert (out - other).norm() <= 2e-5 * out.norm() and not torch.equal(out, other)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    other.backward(grad)
    for one, two in zip(ours, chunked, strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad - two.grad).norm() <= 2e-5 * one.grad.norm()
