"""Layer of the local layer spec: Megatron-core's, with a sum and the norm after it as one op."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor


@cache
def local_layer() -> type:
    """Return the class. It imports Megatron-core, whose layer it inherits from."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class LocalLayer(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types here
        """A layer without dropout, biases after its sums, and parts that are recomputed alone."""

        def forward(
            self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
        ) -> tuple[Tensor, None]:
            """Shape: hidden_states [T, 1, C]; returns as much, and no context to attend to."""
            attended, _ = self.self_attention(
                self.input_layernorm(hidden_states),
                attention_mask=None,
                packed_seq_params=packed_seq_params,
            )
            normed, summed = self.pre_mlp_layernorm(attended, hidden_states)
            out, _ = self.mlp(normed)
            return summed + out, None

    return LocalLayer
