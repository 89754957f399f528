"""Attention of the trainer: sequences laid end to end, each causal in itself."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.backend import AttentionKernel, attention_backend
from spmd_rl.kernels.attention.token_attention import TokenAttention


class PackedAttention(TokenAttention):
    """Causal attention within each of the sequences laid end to end.

    `prefixes` [N] is for the CPU only: the earlier sequence that each one continues, whose tokens
    it sees before its own; -1 for none. `split` is for FlashAttention only: the size of the splits
    of keys in tokens (kv_splits.py), 0 to attend to all at once. The backend is chosen at the first
    call, because mixed precision decides on the dtype of queries.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        *,
        num_heads: int,
        num_kv_heads: int,
        device: torch.device,
        prefixes: NDArray[np.int32] | None = None,
        split: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.prefixes = np.full(len(self.lengths), -1) if prefixes is None else prefixes
        self.heads_per_kv = num_heads // num_kv_heads
        self.device = device
        self.split = split
        self._kernel: AttentionKernel | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._kernel is None:
            backend = attention_backend(q.shape[-1], q.dtype, self.device, self.split)
            self._kernel = backend.packed(self.lengths, self.prefixes, self.heads_per_kv)
        return self._kernel(q, k, v)
