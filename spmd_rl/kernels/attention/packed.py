"""Attention of the trainer: sequences laid end to end, each causal in itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.backend import AttentionKernel, attention_backend, latent_dim_of
from spmd_rl.kernels.attention.coded_backend import with_codes
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach, TokenAttention, attend
from spmd_rl.kernels.delta.states import PackedStates, Places, SequenceStates
from spmd_rl.kernels.low_precision.kv_codes import KvExponents


class PackedAttention(TokenAttention):
    """Causal attention within each of the sequences laid end to end.

    `prefixes` [N] is for the CPU only: the earlier sequence that each one continues, whose tokens
    it sees before its own; -1 for none. `split` is for FlashAttention only: the size of the splits
    of keys in tokens (kv_splits.py), 0 to attend to all at once. With `exponents`, keys and values
    are rounded as a cache with these rounds them. A kernel is chosen at the first call with heads
    of its shape, because mixed precision decides on the dtype of queries.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        *,
        device: torch.device,
        prefixes: NDArray[np.int32] | None = None,
        split: int = 0,
        exponents: KvExponents | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.prefixes = np.full(len(self.lengths), -1) if prefixes is None else prefixes
        self.device = device
        self.split = split
        self.exponents = exponents
        self._places: Places | None = None
        self._kernels: dict[tuple[int, int, int], AttentionKernel] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        shape = q.shape[-1], q.shape[1] // k.shape[1], latent_dim_of(k, v)
        if shape not in self._kernels:
            self._kernels[shape] = self._kernel(q.dtype, *shape)
        return attend(self._kernels[shape], q, k, v, reach)

    def _kernel(
        self, dtype: torch.dtype, head_dim: int, heads_per_kv: int, latent_dim: int
    ) -> AttentionKernel:
        backend = attention_backend(head_dim, dtype, self.device, self.split, latent_dim)
        backend = with_codes(backend, self.exponents, self.device)
        return backend.packed(self.lengths, self.prefixes, heads_per_kv)

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        own = [slice(*bounds) for bounds in zip(starts.tolist(), ends.tolist(), strict=True)]
        for number, new in enumerate(own):
            before = int(self.prefixes[number])
            parts = [new] if before < 0 else [own[before], new]
            yield new, [torch.cat([one[part] for part in parts]) for one in rows]

    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        continues = self.prefixes >= 0
        if not continues.any():
            if self._places is None and self.device.type == "cuda":
                self._places = Places.of(self.lengths, self.device)
            states = PackedStates(self.lengths, places=self._places)
            yield slice(0, int(self.lengths.sum())), states
            return
        of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = PackedStates(self.lengths[~continues])
        yield self._rows(~continues[of_token]), first
        number = np.cumsum(~continues) - 1  # of each sequence among the first ones
        parents = number[self.prefixes[continues]]
        yield self._rows(continues[of_token]), PackedStates(self.lengths[continues], first, parents)

    def _rows(self, are_meant: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.flatnonzero(are_meant)).to(self.device)
