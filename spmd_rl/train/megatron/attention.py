"""Attention and norm of the local layer spec: our kernels as modules of Megatron-core.

Rotary positions are turned here too, from each token's position: Megatron-core would count them
from the start of a packed sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from spmd_rl.kernels import PackedAttention, QkNorm, Rotary, add_rms_norm, qk_norm_rope, rms_norm
from spmd_rl.model.families.rules import RankPart
from spmd_rl.train.megatron.packing import held_positions
from spmd_rl.train.megatron.sums import GatherRows

NO_NORM = QkNorm(None, None, 0.0)  # where Megatron-core has normed queries and keys already


@dataclass
class AttentionInputs:
    """What attention needs of a micro-batch. `attend` is None where another module attends."""

    rotary: Rotary
    lengths: NDArray[np.int32]
    context: RankPart
    context_group: dist.ProcessGroup
    attend: PackedAttention | None


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
    """Our kernels, and across context-parallel ranks torch's."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1

    def attend(
        self, inputs: AttentionInputs, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        if inputs.attend is not None:
            return inputs.attend(self.layer, query, key, value)
        return _attend_across_ranks(query, key, value, inputs)


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


def _attend_across_ranks(
    query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs
) -> Tensor:
    """Attend from this rank's tokens to those of all context-parallel ranks.

    Keys and values are gathered, and queries stay. Ranks: all of the cp group.
    """
    order = _whole_order(inputs, query.device)
    keys, values = (
        GatherRows.apply(one, inputs.context_group).index_select(0, order) for one in (key, value)
    )
    out, row, base = [], 0, 0
    for length in inputs.lengths.tolist():
        own = torch.from_numpy(held_positions(length, inputs.context)).to(query.device)
        q = query[row : row + len(own)].transpose(0, 1)
        k, v = (one[base : base + length].transpose(0, 1) for one in (keys, values))
        mask = own[:, None] >= torch.arange(length, device=query.device)
        found = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)
        out.append(found[0].transpose(0, 1))
        row, base = row + len(own), base + length
    return torch.cat(out)


def _whole_order(inputs: AttentionInputs, device: torch.device) -> Tensor:
    """Return where each token of the whole sequences is among the gathered tokens."""
    bases = np.cumsum(inputs.lengths) - inputs.lengths
    held = [
        held_positions(int(length), RankPart(inputs.context.count, index)) + base
        for index in range(inputs.context.count)
        for length, base in zip(inputs.lengths, bases, strict=True)
    ]
    return torch.from_numpy(np.argsort(np.concatenate(held))).to(device)


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
