"""The trainer's side of attention: sequences laid end to end, each causal in itself.

Where FlashAttention does not apply, they are laid out in rows (attention.py); shape letters as
there.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.attention.blocked import (
    RowLayout,
    attention_of_rows,
    doublings,
    lay_rows,
    token_order,
)
from spmd_rl.kernels.attention.flash import PackedFlash, flash_takes
from spmd_rl.kernels.attention.flash_splits import PackedSplits
from spmd_rl.kernels.runtime.padding import cut_rows, padded_rows


class PackedAttention:
    """Causal attention within each of the sequences laid end to end: the trainer's.

    Call it as `attend(layer, q, k, v)`; q [T', H, D], k and v [T', K, D] where T' may be the tokens
    padded to the row tile. Returns [T', H, D]. `prefixes` [N], on the CPU only: the earlier
    sequence that each one goes on from, whose tokens it sees before its own; -1 for none. `split`,
    with FlashAttention only: keys are seen in splits of so many tokens (splits.py); 0 for all at
    once.
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
        self.groups = num_heads // num_kv_heads
        self.device = device
        self.split = split

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if flash_takes(q.shape[-1], q.dtype, q.device):
            return self._flash(q, k, v)
        return self._blocks(q, k, v)

    @cached_property
    def _flash(self) -> PackedFlash | PackedSplits:
        if 0 < self.split < self.lengths.max():
            return PackedSplits(self.lengths, self.split, self.device)
        return PackedFlash(self.lengths, self.device)

    @cached_property
    def _blocks(self) -> _PackedBlocks:
        return _PackedBlocks(self.lengths, self.prefixes, self.groups, self.device)


class _PackedBlocks:
    """Packed sequences laid out in rows, for `attention_of_rows`.

    Sequences are computed beside those of about their length, so that the longest does not widen
    all.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        prefixes: NDArray[np.int32],
        groups: int,
        device: torch.device,
    ) -> None:
        starts = np.where(prefixes >= 0, lengths[prefixes], 0)
        first = np.cumsum(lengths) - lengths
        parts = doublings(lengths * groups)
        self.parts = [
            _PackedPart(
                first, starts, lengths, prefixes, np.flatnonzero(parts == part), groups, device
            )
            for part in np.unique(parts)
        ]
        self.order = token_order(lengths, parts, device) if len(self.parts) > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [part.attend(q, k, v) for part in self.parts]
        return cut_rows(
            outs[0] if self.order is None else torch.cat(outs).index_select(0, self.order), len(q)
        )


class _PackedPart:
    """Those sequences of a call, `chosen`, that are laid out together."""

    def __init__(
        self,
        first: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        prefixes: NDArray[np.int32],
        chosen: NDArray[np.int64],
        groups: int,
        device: torch.device,
    ) -> None:
        before, own, ends = first[prefixes[chosen]], first[chosen], (starts + lengths)[chosen]
        self.layout = RowLayout.build(own, starts[chosen], lengths[chosen], groups, device)
        self.num_keys = padded_rows(int(ends.max()))
        offset, start = np.arange(self.num_keys), starts[chosen][:, None]
        keys = np.where(offset < start, before[:, None] + offset, own[:, None] + offset - start)
        self.keys = torch.from_numpy(np.where(offset < ends[:, None], keys, 0).reshape(-1)).to(
            device
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self.layout.rows(q, k.shape[1])
        return self.layout.tokens(
            attention_of_rows(rows, self._laid(k), self._laid(v), self.layout)
        )

    def _laid(self, x: Tensor) -> Tensor:
        """[T', K, D] -> [K, B, S, D]."""
        return lay_rows(x, self.keys).view(x.shape[1], self.layout.batch, self.num_keys, -1)
