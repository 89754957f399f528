"""Gated delta rule on NVIDIA GPUs: kernels forward; backward, products of matrices (chunked.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.delta.rule import (
    NORM_EPS,
    DeltaHeads,
    DeltaWeights,
    chunked_gated_delta,
    plain_gated_norm,
)
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.kernels.runtime.differentiable import call


def gated_delta_on_gpu(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    heads: DeltaHeads,
    states: SequenceStates,
) -> Tensor:
    """Shape: as `dispatch.gated_delta_pass`."""
    return call(_GatedDelta, qkv, b, a, *weights, heads, states)


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, b: Tensor, a: Tensor, *given: Any) -> Tensor:
        from spmd_rl.kernels.delta.recurrence_triton import recurrence

        conv, dt_bias, a_log, heads, states = given
        ctx.save_for_backward(qkv, b, a, conv, dt_bias, a_log)
        ctx.heads, ctx.lengths = heads, states.lengths
        q, k, v = _convolved(qkv, conv, heads, states)
        return recurrence(q, k, v, b, a, dt_bias, a_log, states.places, states.memory(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            given = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            qkv, b, a, *weights = given
            out = chunked_gated_delta(qkv, b, a, DeltaWeights(*weights), ctx.heads, ctx.lengths)
            found = torch.autograd.grad(out, given, grads[0])
        return *found, None, None


def _convolved(
    qkv: Tensor, conv: Tensor, heads: DeltaHeads, states: SequenceStates
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, and hand on the last rows before the convolution."""
    from spmd_rl.kernels.delta.recurrence_triton import conv_heads

    places, before = states.places, states.begin(0)
    if before is not None:
        states.end(0, _last_rows(qkv, before, places.first, places.lengths))
    return conv_heads(qkv, conv, before, places, heads, NORM_EPS)


def _last_rows(qkv: Tensor, before: Tensor, first: Tensor, lengths: Tensor) -> Tensor:
    """Return the last rows of sequences, of those before the pass where it has too few.

    Shape: before [B, W - 1, C], first and lengths [B]; returns like `before`.
    """
    count = before.shape[1]
    place = lengths[:, None] + torch.arange(-count, 0, device=qkv.device)
    new = qkv[(first[:, None] + place).clamp(min=0).long()]
    old = before.gather(1, (place + count).clamp(max=count - 1)[..., None].long().expand_as(before))
    return torch.where((place >= 0)[..., None], new, old)


def gated_norm_on_gpu(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shape: as `rule.plain_gated_norm`."""
    return call(_GatedNorm, x, gate, weight, eps)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from spmd_rl.kernels.delta.recurrence_triton import gated_norm

        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return gated_norm(x, gate, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            given = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            x, gate, weight = given
            out = plain_gated_norm(x, gate, weight, ctx.eps)
            found = torch.autograd.grad(out, given, grads[0])
        return *found, None
