"""Torch module of a block."""

from __future__ import annotations

from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.kernels.linear.shard_exchange import RowExchange
from spmd_rl.kernels.linear.shard_gradients import all_rows
from spmd_rl.model.layers.block import NORMS, BlockSpec
from spmd_rl.model.layers.norm_module import RmsNorm


class Block(nn.Module):
    """Block `number` of a decoder. Its modules have the names that its layers give themselves.

    A trainer's ranks that share it are behind `rows`. Each has its rows of x and residual.
    """

    def __init__(
        self, spec: BlockSpec, rms_eps: float, number: int, rows: RowExchange | None = None
    ) -> None:
        super().__init__()
        self._rows = rows
        for layer in spec.layers:
            self.add_module(layer.name, layer.module(number))
        for norm in NORMS:
            self.add_module(norm, RmsNorm(spec.hidden_size, rms_eps, spec.zero_centred))
        self._order = (NORMS[0], spec.mixer.name, NORMS[1], spec.mlp.name)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary, attend: TokenAttention
    ) -> tuple[Tensor, Tensor]:
        """Map (x, residual) to the next pair; a layer's input and output are residual + x."""
        first_norm, mixer, second_norm, mlp = (getattr(self, name) for name in self._order)
        normed, residual = first_norm(x, residual)
        x = mixer(all_rows(normed, self._rows), rotary, attend)
        normed, residual = second_norm(x, residual)
        return mlp(all_rows(normed, self._rows)), residual
