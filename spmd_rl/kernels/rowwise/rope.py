"""Rotary positions: one fp32 table of cosines and sines, made on the host, used by trainer and
engine alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.attention.kv_write import KvPlace, write_kv
from spmd_rl.kernels.rowwise.norm import rms_norm
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.recompute import remakable


def rope_table(inv_freq: Tensor, num_positions: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency.

    Shape: inv_freq [D/2] fp32; returns two tensors [num_positions, D/2] fp32.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension, in fp32, with one rounding at the end.

    Shape: x [T, H, D], cos and sin [T, D/2] (the table's rows for each token).
    Source: Su et al., RoFormer (2021), in the half-split layout of Hugging Face models.
    """
    return call(_Rope, x, *_over_heads(cos, sin))


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of every head, where both weights are given, then `rope`; on NVIDIA GPUs one
    kernel, with those bits.

    There it reads positions, and a place's slots, early (`overlap_triton`).
    Shape: q [T, H, D] and k [T, K, D], perhaps parts of one tensor; weights [D]; positions [T]; cos
    and sin the whole table [P, D/2]. Returns two contiguous tensors. Raises: ValueError for
    different numbers of tokens.
    """
    _check_tokens(q, k, positions)
    if q.is_cuda:
        rest = q_weight, k_weight, eps, positions, cos, sin
        turned: tuple[Tensor, Tensor] = call(_QkNormRope, q, k, *rest)
        remakable(turned, lambda: _QkNormRope.apply(q.detach(), k.detach(), *rest))
        return turned
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    factors = _over_heads(cos, sin)
    return call(_Rope, q, *factors), call(_Rope, k, *factors)


def qk_norm_rope_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: KvPlace,
) -> Tensor:
    """`qk_norm_rope`, then `write_kv` of what became of k, and of v; without gradients. On NVIDIA
    GPUs one kernel.

    Shape: as there; returns the queries.
    """
    _check_tokens(q, k, positions)
    if q.is_cuda:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_into_pages

        return qk_norm_rope_into_pages(q, k, v, q_weight, k_weight, eps, positions, cos, sin, place)
    q, k = qk_norm_rope(q, k, q_weight, k_weight, eps, positions, cos, sin)
    write_kv(*place, k, v)
    return q


def _check_tokens(q: Tensor, k: Tensor, positions: Tensor) -> None:
    if not len(q) == len(k) == len(positions):
        raise ValueError(f"{len(q)} queries and {len(k)} keys at {len(positions)} positions")


def _over_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 1, D]: what a head is multiplied by, and what its swapped halves are.

    Over the whole width, because loops over a half of each head are short.
    """
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _rotate(x: Tensor, along: Tensor, across: Tensor) -> Tensor:
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * along).add_(swapped.mul_(across)).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Tensor, across: Tensor) -> Tensor:
        ctx.save_for_backward(along, across)
        return _rotate(x, along, across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        along, across = ctx.saved_tensors
        return _rotate(grads[0], along, -across), None, None


class _QkNormRope(torch.autograd.Function):
    """On NVIDIA GPUs, one kernel each way."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_forward

        ctx.save_for_backward(q, k, q_weight, k_weight, positions, cos, sin)
        ctx.eps = eps
        return qk_norm_rope_forward(q, k, q_weight, k_weight, eps, positions, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_backward

        q, k, q_weight, k_weight, positions, cos, sin = ctx.saved_tensors
        grad_q, grad_k = grads
        found = qk_norm_rope_backward(
            grad_q, grad_k, q, k, q_weight, k_weight, ctx.eps, positions, cos, sin
        )
        return *found, None, None, None, None
