"""Linear layer of the network, perhaps with a low-rank adapter beside it (lora.py)."""

from __future__ import annotations

from torch import Tensor, nn

from spmd_rl.kernels import linear
from spmd_rl.model.lora import LoraConfig


class Linear(nn.Linear):
    """A linear layer with the contract's product; `adapt` gives it an adapter."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self._scale = 1.0

    def adapt(self, lora: LoraConfig) -> None:
        """Add an adapter, whose weights are unset."""
        self.lora_A = Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, self.out_features, bias=False)
        self._scale = lora.scale

    @property
    def is_adapted(self) -> bool:
        return self.lora_A is not None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        return self.with_adapter(input, linear(input, self.weight, self.bias))

    def with_adapter(self, x: Tensor, product: Tensor) -> Tensor:
        """Return `product`, which the layer's weights give of x, plus what the adapter gives.

        All roundings are to x's dtype: of A(x), of it scaled, of B's product, and of the sum. So
        the bits are the same whether or not the layer's product is a part of a fused one.
        Shape: x [T, K], product [T, N]; returns [T, N].
        """
        if self.lora_A is None or self.lora_B is None:
            return product
        return product + self.lora_B(self.lora_A(x) * self._scale)
