"""SymmExchange: a shared model's sums over the GPUs of a host, without waiting for the host.

A call is three kernels: one that writes, a barrier, and one that reads (peer_sums_triton.py), which
may norm what it reads (peer_norms_triton.py). More rows than a buffer holds go in several calls.
Where rows are many, a sum takes another barrier, and each rank reads less.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.linear.later_sum import LaterSum
from spmd_rl.kernels.rowwise.norm import add_rms_norm
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.peer_memory import PeerMemory
from spmd_rl.offload.peer_bytes import EXCHANGE_BYTES

WORD_BYTES = 4
LARGE_BYTES = 1 << 20  # of a part, from which ranks sum shares of it
LARGE_RANKS = 4  # two would read three quarters, and wait once more


class SymmExchange:
    """By memory that every rank of `group` maps. It is a `ShardExchange`.

    The bits are those of `TorchExchange`. All calls of a rank are on one stream.
    """

    is_recordable: ClassVar[bool] = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Make the memory on the current device, outside of any that sleeps.

        Ranks: all of the group, 2, 4 or 8. Blocks: until each has called.
        """
        from spmd_rl.kernels.linear.peer_sums_triton import PeerBuffers

        self._memory = PeerMemory(group, EXCHANGE_BYTES)
        own, peers = self._memory.own.view(torch.int32).view(2, -1), self._memory.table(0)
        turns = torch.zeros(2, dtype=torch.int32, device=own.device)
        self._buffers = PeerBuffers(own, peers, turns)
        self._rank = group.rank()

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `ShardExchange.sum` says. Raises: ValueError for rows longer than a buffer."""
        from spmd_rl.kernels.linear.peer_sums_triton import (
            shares_of_peers,
            sum_of_peers,
            sum_own_share,
        )

        out = torch.empty_like(part, dtype=dtype)
        for rows in self._shared(part):
            if self._is_large(part):
                sum_own_share(out[rows].shape, self._rank, bias, dtype, self._buffers)
                self._memory.barrier(0)
                shares_of_peers(out[rows], self._buffers)
            else:
                sum_of_peers(out[rows], bias, self._buffers)
        return out

    def sum_later(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `ShardExchange.sum_later` says. A norm takes the sum in its own kernel."""
        take, norm = partial(self.sum, part, bias, dtype), partial(self._add_rms_norm, part, bias)
        return LaterSum(part.shape, dtype, part.device, take, norm)

    def _add_rms_norm(
        self, part: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return what `add_rms_norm` gives of the sum. Raises: ValueError as `sum`."""
        if self._is_large(part):
            return add_rms_norm(self.sum(part, bias, residual.dtype), residual, weight, eps)
        from spmd_rl.kernels.linear.peer_norms_triton import NormedRows, norm_of_peers

        residual = dense(residual)
        every = NormedRows(residual, torch.empty_like(residual), torch.empty_like(residual))
        for rows in self._shared(part):
            norm_of_peers(every, range(len(part))[rows], bias, weight, eps, self._buffers)
        return every.out, every.summed

    def gather_columns(self, own: Tensor) -> Tensor:
        """Do what `ShardExchange.gather_columns` says, of elements of 4 or 8 bytes.

        Raises: ValueError for rows longer than a buffer.
        """
        from spmd_rl.kernels.linear.peer_sums_triton import columns_of_peers

        out = own.new_empty(len(own), self._memory.num_ranks * own.shape[1])
        words = out.view(torch.int32)
        for rows in self._shared(own):
            columns_of_peers(words[rows], self._buffers)
        return out

    def _is_large(self, part: Tensor) -> bool:
        return self._memory.num_ranks >= LARGE_RANKS and part.nbytes >= LARGE_BYTES

    def _shared(self, own: Tensor) -> Iterator[slice]:
        """Have all ranks put the same rows into their buffers, as many as fit, and yield them.

        Whoever gets them reads them from all buffers before it asks for the next ones.
        """
        from spmd_rl.kernels.linear.peer_sums_triton import put

        words = own.contiguous().view(torch.int32)
        most = self._buffers.num_words // words.shape[1]
        if most == 0:
            raise ValueError(f"a row of {words.shape[1] * WORD_BYTES} bytes does not fit a buffer")
        for first in range(0, len(words), most):
            rows = slice(first, first + most)
            put(words[rows], self._buffers)
            self._memory.barrier(0)
            yield rows
