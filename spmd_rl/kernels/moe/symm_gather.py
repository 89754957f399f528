"""SymmGather: an engine's experts over the GPUs of a host, without waiting for the host.

Each rank writes its rows into the memory of all ranks, and reads its tokens' slots from there.
Barriers on the device lie between, one before the experts and one behind them. So a layer can be
recorded as a CUDA graph. NVLink multicast is not used.

A rank may write into another's memory while that one is still in the layer before: the rows there
were read before the barrier behind its experts, and the slots are written behind the next one.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import OwnExperts, blocks_of
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.runtime.peer_memory import PeerMemory
from spmd_rl.offload.peer_bytes import GatheredRow, gather_bytes

CHANNELS = (0, 1)  # of the barriers before the experts, and behind them


class RowSizes(NamedTuple):
    """What a row of an engine's mixtures has."""

    hidden_size: int
    experts_per_token: int
    dtype: torch.dtype


class SymmGather:
    """By torch's symmetric memory, which every rank of `group` maps. It is an `ExpertGather`."""

    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, max_rows: int, sizes: RowSizes
    ) -> None:
        """Make the memory on the current device, outside of any that sleeps.

        It has `max_rows` rows of each rank, and room for all their slots.
        Ranks: all of the group. Blocks: until each has called.
        Raises: ValueError where the ranks cannot have equally many experts.
        """
        self.max_rows = max_rows
        self._blocks = blocks_of(group, num_experts)
        self._rank = group.rank()
        self._sizes = sizes
        self._use(PeerMemory(group, sum(self._part_bytes()), CHANNELS))

    def rehearsal(self) -> SymmGather:
        """Return one that runs the same kernels in memory of its own, and waits for no rank.

        Its sums have no meaning. It is there to compile kernels while other ranks do other work.
        """
        other = copy.copy(self)
        other._use(self._memory.rehearsal())
        return other

    def _use(self, memory: PeerMemory) -> None:
        """Have rows meet in `memory`."""
        from spmd_rl.kernels.moe.peer_triton import PeerTables

        self._memory = memory
        firsts, self._parts = [0], []
        for num_bytes, dtype in zip(self._part_bytes(), self._dtypes(), strict=True):
            self._parts.append(memory.own[firsts[-1] : firsts[-1] + num_bytes].view(dtype))
            firsts.append(firsts[-1] + num_bytes)
        self._peers = PeerTables(*(memory.table(first) for first in firsts[:-1]))

    def run(self, x: Tensor, routes: ExpertRoutes, experts: OwnExperts) -> Tensor:
        """Do what `ExpertGather.run` says. The host does not wait.

        Raises: ValueError for rows that do not fit the memory.
        """
        from spmd_rl.kernels.moe.peer_triton import place_slots, push, sum_peers

        ids, weights, x = routes.ids.contiguous(), routes.weights.contiguous(), x.contiguous()
        found = RowSizes(x.shape[1], ids.shape[1], x.dtype)
        if len(x) > self.max_rows or found != self._sizes:
            raise ValueError(f"{len(x)} rows of {found} for {self.max_rows} of {self._sizes}")
        push(x, ExpertRoutes(ids, weights), self._peers, self._blocks, self._rank)
        self._memory.barrier(CHANNELS[0])
        num_rows = self._blocks.num_ranks * len(x)
        rows, own_ids, own_weights, slots = (
            part[: num_rows * size].view(num_rows, size)
            for part, size in zip(self._parts, self._row_sizes(), strict=True)
        )
        place_slots(experts(rows, ExpertRoutes(own_ids, own_weights)), slots)
        self._memory.barrier(CHANNELS[1])
        return sum_peers(ids, self._peers, self._blocks, self._rank, x)

    def _row_sizes(self) -> tuple[int, int, int, int]:
        """Return the elements of a row of each part of the memory."""
        hidden, chosen, _ = self._sizes
        return hidden, chosen, chosen, chosen * hidden

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return self._sizes.dtype, torch.int64, torch.float32, self._sizes.dtype

    def _part_bytes(self) -> list[int]:
        """Return the bytes of each part: rows, ids, weights and slots of all ranks, aligned."""
        hidden, chosen, dtype = self._sizes
        row = GatheredRow(hidden, chosen, dtype.itemsize)
        return gather_bytes(row, self._blocks.num_ranks * self.max_rows)
