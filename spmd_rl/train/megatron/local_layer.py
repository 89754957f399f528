"""Layer of the local layer spec. Importing this module imports Megatron-core."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LocalLayer(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types here
    """Megatron-core's layer, whose attention is added and normed by one op.

    It has no dropout, no bias after the sums, and no part that is recomputed by itself.
    """

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Shape: hidden_states [T, 1, C]; returns as much, and no context of another model."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=None,
            packed_seq_params=packed_seq_params,
        )
        normed, summed = self.pre_mlp_layernorm(attended, hidden_states)
        out, _ = self.mlp(normed)
        return summed + out, None
