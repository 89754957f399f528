"""Linear layer of the network, perhaps with a low-rank adapter beside it (lora.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear
from spmd_rl.kernels.linear.adapters import add_adapters
from spmd_rl.kernels.linear.row_shards import SharedProduct
from spmd_rl.kernels.low_precision.block_codes import BlockCodes, Weight, rounded, torch_dtype
from spmd_rl.kernels.low_precision.products import coded_linear, whole
from spmd_rl.types.code_format import CodeFormat


class Factors(NamedTuple):
    """What a layer without a bias multiplies rows with: a weight, perhaps with A and B beside it.

    Shape: [N, K], [R, K] and [N, R].
    """

    tensors: tuple[Weight, ...]
    scale: float

    def product(self, x: Tensor) -> Tensor:
        """Return what the layer gives. Shape: x [T, K]; returns [T, N] in x's dtype."""
        weight, *beside = (whole(factor, x.dtype) for factor in self.tensors)
        if not beside:
            return linear(x, weight)
        a, b = beside
        return _adapted(x, weight, None, a, b, self.scale)


class Linear(nn.Linear):
    """A linear layer with the contract's product.

    `adapt` gives it an adapter, and `hold_codes` a weight in few bits. A layer that ranks may share
    has another `product`, and neither of both.
    """

    weight_scale_inv: nn.Parameter | None  # of codes
    # of the weight, as codes or as a whole master weight that each pass rounds
    format: CodeFormat | None = None
    master_scales: Tensor | None = None  # (`coded_masters.py`)

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.is_switched_off = False  # whether the adapter is left out
        self.scale = 1.0
        self.product: SharedProduct = linear
        self.register_parameter("weight_scale_inv", None)

    def hold_codes(self, code_format: CodeFormat) -> None:
        """Have codes and scales in place of the weight, unset. No gradient can be taken."""
        whole, device = (self.out_features, self.in_features), self.weight.device
        codes, scales = (
            nn.Parameter(torch.empty(shape, dtype=torch_dtype(dtype), device=device), False)
            for shape, dtype in (
                (code_format.code_shape(whole), code_format.code_dtype),
                (code_format.scale_shape(whole), code_format.scale_dtype),
            )
        )
        self.weight, self.weight_scale_inv = codes, scales
        self.format = code_format

    def adapt(self, rank: int, scale: float) -> None:
        """Add an adapter of this rank, whose weights are unset; what A computes is scaled."""
        self.lora_A = Linear(self.in_features, rank, bias=False)
        self.lora_B = Linear(rank, self.out_features, bias=False)
        self.scale = scale

    @property
    def has_codes(self) -> bool:
        """Whether codes are in place of the weight."""
        return self.weight_scale_inv is not None

    @property
    def codes(self) -> BlockCodes:
        """The weight in few bits of a layer that holds codes."""
        assert self.weight_scale_inv is not None and self.format is not None
        return BlockCodes(self.weight, self.weight_scale_inv, self.in_features, self.format)

    @property
    def operand(self) -> Weight:
        """The codes of a layer that holds some, else the weight."""
        return self.codes if self.has_codes else self.weight

    def operand_in(self, dtype: torch.dtype) -> Weight:
        """Return what a pass in `dtype` multiplies with, without a gradient."""
        if self.master_scales is not None:
            assert self.format is not None
            return rounded(self.format, self.weight.detach(), self.master_scales, dtype)
        return self.codes if self.has_codes else self.weight.to(dtype)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The weight and, beside it, those of A and B where the layer has an adapter."""
        return self.weight, *(self.adapter or ())

    @torch.no_grad()
    def factors_in(self, dtype: torch.dtype) -> Factors:
        """Return what a pass in `dtype` multiplies with, without a gradient."""
        beside = (factor.to(dtype) for factor in self.adapter or ())
        return Factors((self.operand_in(dtype), *beside), self.scale)

    @property
    def is_adapted(self) -> bool:
        return self.adapter is not None

    @property
    def adapter(self) -> tuple[Tensor, Tensor] | None:
        """The weights of A and B; None without an adapter, or where it is left out."""
        if self.lora_A is None or self.lora_B is None or self.is_switched_off:
            return None
        return self.lora_A.weight, self.lora_B.weight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        if self.has_codes:
            return self.with_adapter(input, coded_linear(input, self.codes, self.bias))
        adapter = self.adapter
        if adapter is None:
            return self.product(input, self.weight, self.bias)
        return _adapted(input, self.weight, self.bias, *adapter, self.scale)

    def with_adapter(self, x: Tensor, product: Tensor) -> Tensor:
        """Return `product`, which the layer's weights give of x, plus what the adapter gives.

        No gradient is kept, and `product` may change in place. The bits are the same whether or not
        the product is a part of a fused one.
        Shape: x [T, K], product [T, N]; returns [T, N].
        """
        adapter = self.adapter
        if adapter is None:
            return product
        return add_adapters(product, x, *adapter, self.scale, (self.out_features,))[0]


def _adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Return what a layer with an adapter gives. Shape: x [T, K]; returns [T, N]."""
    if torch.is_grad_enabled():
        out: Tensor = _Adapted.apply(x, weight, bias, a, b, scale)
        return out
    return add_adapters(linear(x, weight, bias), x, a, b, scale, (len(b),))[0]


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
        out, low = add_adapters(linear(x, weight, bias), x, a, b, scale, (len(b),))
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grads[0].to(x.dtype)
        grad_low = _scaled_product(grad, b, ctx.scale)
        return (
            (grad @ weight).addmm_(grad_low, a) if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            grad_low.t() @ x,
            _scaled_product(grad.t(), low, ctx.scale),
            None,
        )


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return a @ b * scale, rounded once."""
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale)
