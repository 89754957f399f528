"""Calls of the kernels that norm and rotate heads, for the interpreter."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_backward, qk_norm_rope_forward


def both_ways(
    q: Tensor, k: Tensor, pulls: tuple[Tensor, Tensor], norm: tuple, rotary: tuple
) -> tuple[Tensor | None, ...]:
    """Return queries and keys, and the gradients of both and of the norm's weights."""
    inputs = QkNorm(*norm), Rotary(*rotary)
    turned = qk_norm_rope_forward(q, k, *inputs)
    return *turned, *qk_norm_rope_backward(*pulls, q, k, *inputs)
