"""Linear layers whose rows do not depend on how many rows there are."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.linear.cpu import linear_on_cpu
from spmd_rl.kernels.runtime.capability import BLACKWELL, HOPPER
from spmd_rl.kernels.runtime.differentiable import call


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, rounded once to x's dtype. On GPUs the promise is for bf16.

    Shape: x [T, K], weight [N, K], bias [N]; returns [T, N].
    """
    if x.device.type == "cpu":
        return linear_on_cpu(x, weight, bias)
    if is_exact(x):
        return call(_Linear, x, weight, bias, x.dtype)
    return F.linear(x, weight, bias)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in fp32, as accumulated: the product of the language-model head.

    Shape: x [M, K], weight [V, K]; returns [M, V] in fp32.
    """
    if x.dtype == torch.float32:
        return linear(x, weight)
    if is_exact(x):
        return call(_Linear, x, weight, None, torch.float32)
    return linear(x.float(), weight.float())


def is_exact(x: Tensor) -> bool:
    """Return whether products of x keep the contract's chain of sums on its GPU."""
    return x.is_cuda and keeps_chain(x.dtype, x.device)


@cache
def keeps_chain(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the contract's kernel multiplies `dtype` on a GPU.

    Its tiles need 227 KiB of shared memory.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (
        HOPPER,
        BLACKWELL,
    )


class _Linear(torch.autograd.Function):
    """The contract's product forward, the library's backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        from spmd_rl.kernels.linear.dispatch import matmul

        ctx.save_for_backward(x, weight)
        return matmul(x, weight, bias, out_dtype)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )
