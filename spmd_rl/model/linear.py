"""Linear layer of the network, perhaps with a low-rank adapter beside it (lora.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear
from spmd_rl.model.lora import LoraConfig


class Linear(nn.Linear):
    """A linear layer with the contract's product; `adapt` gives it an adapter."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.is_switched_off = False  # whether the adapter is left out
        self._scale = 1.0

    def adapt(self, lora: LoraConfig) -> None:
        """Add an adapter, whose weights are unset."""
        self.lora_A = Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, self.out_features, bias=False)
        self._scale = lora.scale

    @property
    def is_adapted(self) -> bool:
        return self.lora_A is not None and not self.is_switched_off

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        if self.lora_A is None or self.lora_B is None or self.is_switched_off:
            return linear(input, self.weight, self.bias)
        if torch.is_grad_enabled():
            a, b = self.lora_A.weight, self.lora_B.weight
            out: Tensor = _Adapted.apply(input, self.weight, self.bias, a, b, self._scale)
            return out
        return self.with_adapter(input, linear(input, self.weight, self.bias))

    def with_adapter(self, x: Tensor, product: Tensor) -> Tensor:
        """Return `product`, which the layer's weights give of x, plus what the adapter gives.

        No gradient is kept. The bits are the same whether or not the product is a part of a fused
        one.
        Shape: x [T, K], product [T, N]; returns [T, N].
        """
        if self.lora_A is None or self.lora_B is None or self.is_switched_off:
            return product
        return adapted(x, product, self.lora_A.weight, self.lora_B.weight, self._scale)[0]


def adapted(
    x: Tensor, product: Tensor, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of `product` and an adapter's output, and the scaled output of A.

    All roundings are to x's dtype: of A's product, of it scaled, of B's product, and of the sum.
    Shape: x [T, K], product [T, N], a [R, K], b [N, R]; returns [T, N] and [T, R].
    """
    inner = linear(x, a) * scale
    return product + linear(inner, b), inner


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the weight of a plain layer that computes what this weight and its adapter do.

    As in PEFT, the product of B and A is rounded, then that times `scale`, then the sum.
    Shape: weight [N, K], a [R, K] fp32, b [N, R] fp32; returns [N, K] fp32.
    """
    product = linear(b, a.t().contiguous())
    return product.mul_(scale).add_(weight)


class _Adapted(torch.autograd.Function):
    """A layer with its adapter: the contract's products forward, the library's backward.

    As one function, it adds the adapter's gradient of x to the layer's within a product.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        out, inner = adapted(x, linear(x, weight, bias), a, b, scale)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grads[0].to(x.dtype)
        grad_inner = (grad @ b) * ctx.scale
        return (
            (grad @ weight).addmm_(grad_inner, a) if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            grad_inner.t() @ x,
            grad.t() @ inner,
            None,
        )
