"""Linear layers whose rows do not depend on how many rows there are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.tile import pad_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, one rounding to x's dtype.

    Shape: x [T, K], weight [N, K], bias [N]; returns [T, N].
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with the fp32 accumulators as the result (the language-model head).

    Shape: x [M, K], weight [V, K]; returns [M, V] in fp32.
    """
    if x.dtype == torch.float32:
        return linear(x, weight)
    if x.device.type != "cpu":
        return _Fp32Out.apply(x, weight)
    return linear(x.float(), weight.float())


class _Fp32Out(torch.autograd.Function):
    """bf16 operands, fp32 result: what `F.linear` cannot say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.t() @ x
