"""Gated delta rule on NVIDIA GPUs, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmd_rl.kernels.delta.rule import DeltaHeads, DeltaWeights, gates
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense


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
        from spmd_rl.kernels.delta.conv_triton import mix_heads
        from spmd_rl.kernels.delta.recurrence_triton import recurrence

        conv, dt_bias, a_log, heads, states = given
        ctx.save_for_backward(qkv, b, a, conv, dt_bias, a_log)
        ctx.heads, ctx.states = heads, states
        places = states.places
        weights = DeltaWeights(conv, dt_bias, a_log)
        mixed, gates = mix_heads(qkv, b, a, weights, places, heads, states.memory(0))
        return recurrence(mixed, gates, places, heads, states.memory(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sequences have no past: those of an engine have no gradients."""
        from spmd_rl.kernels.delta.conv_triton import conv_gradients, mix_heads
        from spmd_rl.kernels.delta.gradients import delta_gradients

        qkv, b, a, *rest = ctx.saved_tensors
        weights = DeltaWeights(*rest)
        heads, states = ctx.heads, ctx.states
        places, num_tokens = states.places, len(grads[0])
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in (b, a, *rest[1:])]
            log_decay, beta = gates(*leaves)
        mixed, _ = mix_heads(qkv, b, a, weights, places, heads, states.memory(0))
        found = delta_gradients(
            mixed,
            log_decay.detach()[:num_tokens],
            beta.detach()[:num_tokens],
            dense(grads[0]),
            states.lengths,
            heads,
            "tf32x3" if qkv.dtype == torch.float32 else "tf32",
        )
        of_qkv, of_conv = conv_gradients(qkv, weights.conv, places, heads, found.heads)
        padding = (0, 0, 0, len(b) - num_tokens)
        of_gates = [pad(one, padding) for one in (found.log_decay, found.beta)]
        of_b, of_a, *others = torch.autograd.grad([log_decay, beta], leaves, of_gates)
        return of_qkv, of_b, of_a, of_conv, *others, None, None


def gated_norm_on_gpu(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shape: as `rule.plain_gated_norm`."""
    return call(_GatedNorm, x, gate, weight, eps)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from spmd_rl.kernels.delta.norm_triton import gated_norm

        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return gated_norm(x, gate, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from spmd_rl.kernels.delta.norm_triton import gated_norm_gradients

        x, gate, weight = ctx.saved_tensors
        return *gated_norm_gradients(x, gate, weight, ctx.eps, grads[0]), None
