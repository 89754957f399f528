"""Rotary positions, from one fp32 table of cosines and sines that the host makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import KvCoding
from spmd_rl.kernels.rowwise.kv_write import KvSlots, write_kv
from spmd_rl.kernels.rowwise.norm import rms_norm
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.recompute import recomputable


def rope_table(inv_freq: Tensor, num_positions: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of position * frequency.

    Shape: inv_freq [R/2] fp32; returns two tensors [num_positions, R/2] fp32.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension, in fp32, with one rounding at the end.

    Narrower tables rotate the first R elements, in halves, and the others stay as they are.
    Shape: x [T, H, D], cos and sin [T, R/2] (the table's rows for each token).
    Source: Su et al., RoFormer (2021), in the half-split layout of Hugging Face models.
    """
    return call(_Rope, x, *_over_heads(cos, sin))


def qk_norm_rope(q: Tensor, k: Tensor, norm: QkNorm, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Apply `rms_norm` to every head, if there is one, then `rope`.

    On NVIDIA GPUs one kernel does both, with the same bits; it reads positions and slots early
    (`pdl`). Shape: q [T, H, D] and k [T, K, D], which may be slices of one tensor. Returns two
    contiguous tensors. Raises: ValueError for different numbers of tokens.
    """
    _check_tokens(q, k, rotary.positions)
    if q.is_cuda:
        rotated: tuple[Tensor, Tensor] = call(_QkNormRope, q, k, *norm, *rotary)
        recomputable(rotated, lambda: _QkNormRope.apply(q.detach(), k.detach(), *norm, *rotary))
        return rotated
    if norm.q_weight is not None and norm.k_weight is not None:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    positions, cos, sin = rotary
    factors = _over_heads(cos.index_select(0, positions), sin.index_select(0, positions))
    return call(_Rope, q, *factors), call(_Rope, k, *factors)


def qk_norm_rope_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: QkNorm,
    rotary: Rotary,
    target: KvSlots,
    coding: KvCoding | None = None,
) -> Tensor:
    """Apply `qk_norm_rope`, write the keys and `v` into the cache, and return the queries.

    It has no gradients. On NVIDIA GPUs it is one kernel. Shape: as `qk_norm_rope` and `write_kv`.
    """
    _check_tokens(q, k, rotary.positions)
    if q.is_cuda:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_into_pages

        return qk_norm_rope_into_pages(q, k, v, norm, rotary, target, coding)
    q, k = qk_norm_rope(q, k, norm, rotary)
    write_kv(*target, k, v, coding)
    return q


def _check_tokens(q: Tensor, k: Tensor, positions: Tensor) -> None:
    if not len(q) == len(k) == len(positions):
        raise ValueError(f"{len(q)} queries and {len(k)} keys at {len(positions)} positions")


def _over_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a head and of its swapped halves. Shape: [T, 1, R] each.

    They have the whole width, because loops over half of each head are short.
    """
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _rotate(x: Tensor, along: Tensor, across: Tensor) -> Tensor:
    size = along.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((_rotate(x[..., :size], along, across), x[..., size:]), dim=-1)
    wide = x.float()
    swapped = wide.roll(size // 2, dims=-1)
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
    """One kernel forward and one backward, on NVIDIA GPUs.

    Autograd sees tensors only as arguments of their own: `inputs` are a `QkNorm` and a `Rotary`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_forward

        norm, rotary = QkNorm(*inputs[:3]), Rotary(*inputs[3:])
        ctx.save_for_backward(q, k, norm.q_weight, norm.k_weight, *rotary)
        ctx.eps = norm.eps
        return qk_norm_rope_forward(q, k, norm, rotary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_backward

        q, k, q_weight, k_weight, *rotary = ctx.saved_tensors
        norm = QkNorm(q_weight, k_weight, ctx.eps)
        grad_q, grad_k = grads
        found = qk_norm_rope_backward(grad_q, grad_k, q, k, norm, Rotary(*rotary))
        return *found, None, None, None, None
