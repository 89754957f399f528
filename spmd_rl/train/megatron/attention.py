"""Attention and norm of the local layer spec: our kernels as modules of Megatron-core.

Rotary positions are turned here too, from each token's position: Megatron-core would count them
from the start of a packed sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import QkNorm, Rotary, TokenAttention, add_rms_norm, qk_norm_rope, rms_norm

NO_NORM = QkNorm(None, None, 0.0)  # where Megatron-core has normed queries and keys already


@dataclass
class AttentionInputs:
    """What attention needs of a micro-batch. `attend` is None where another module attends."""

    rotary: Rotary
    attend: TokenAttention | None


class RotaryAttention(nn.Module):
    """Attention after rotary positions, with the arguments of Megatron-core's own module."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        norm: QkNorm = NO_NORM,
        **kwargs: Any,
    ) -> Tensor:
        """Norm, rotate and attend. Shape: query [T, H, D], key and value [T, K, D]; [T, H D]."""
        inputs: AttentionInputs = kwargs["packed_seq_params"].inputs
        if not query.is_cuda:  # a GPU's kernel reads slices, and copies what it cannot read
            query, key = query.contiguous(), key.contiguous()
        query, key = qk_norm_rope(query, key, norm, inputs.rotary)
        out = self.attend(inputs, query, key, value.contiguous(), *args, **kwargs)
        return out.reshape(len(query), -1)

    def attend(
        self,
        inputs: AttentionInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend causally within each sequence; the other arguments are those of `forward`."""
        raise NotImplementedError


class LocalAttention(RotaryAttention):
    """Our kernels. Along cp, ranks exchange tokens for heads (attention/shared_tokens.py)."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1

    def attend(
        self, inputs: AttentionInputs, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        assert inputs.attend is not None
        return inputs.attend(self.layer, query, key, value)


class TransformerEngineAttention(RotaryAttention):
    """Transformer-engine's attention, also across context-parallel ranks."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__()
        self.attention = TEDotProductAttention(config, layer_number, *args, **kwargs)

    def attend(
        self,
        inputs: AttentionInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        out: Tensor = self.attention(query, key, value, *args, **kwargs)
        return out


class LocalNorm(nn.Module):
    """RMS norm. Sequence parallelism needs no more of it than a mark on the weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.ones(hidden_size, **like))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return x normed; with a residual, their sum normed, and the sum."""
        if residual is None:
            return rms_norm(x.contiguous(), self.weight, self.eps)
        return add_rms_norm(x.contiguous(), residual, self.weight, self.eps)
