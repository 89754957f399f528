"""SymmGather: an engine's experts over the GPUs of a host, without waiting for the host.

Each rank writes its rows into the memory of all ranks, and reads its tokens' slots from there.
Barriers on the device lie between, one before the experts and one behind them. So a layer can be
recorded as a CUDA graph. NVLink multicast is not used.

A rank may write into another's memory while that one is still in the layer before: the rows there
were read before the barrier behind its experts, and the slots are written behind the next one.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import OwnExperts, blocks_of
from spmd_rl.kernels.moe.router import ExpertRoutes

ALIGN_BYTES = 256
MULTICAST_ENV = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # torch would set it up though nobody uses it


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
        os.environ.setdefault(MULTICAST_ENV, "1")
        from torch.distributed import _symmetric_memory as symmetric

        from spmd_rl.kernels.moe.peer_triton import PeerTables

        self.max_rows = max_rows
        self._blocks = blocks_of(group, num_experts)
        self._rank = group.rank()
        self._sizes = sizes
        most, (hidden, chosen, dtype) = group.size() * max_rows, sizes
        parts = [(most * hidden, dtype), (most * chosen, torch.int64)]
        parts += [(most * chosen, torch.float32), (most * chosen * hidden, dtype)]
        firsts = [0]
        for number, kind in parts:
            size = number * kind.itemsize
            firsts.append(firsts[-1] + math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES)
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric.empty(firsts[-1], dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(memory, group)
        self._parts = [
            memory[first : first + number * kind.itemsize].view(kind)
            for first, (number, kind) in zip(firsts, parts, strict=False)
        ]
        tables = [[at + first for at in self._handle.buffer_ptrs] for first in firsts[:-1]]
        table = torch.tensor(tables, dtype=torch.int64, device=memory.device)
        self._peers = PeerTables(*table.unbind())

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
        self._handle.barrier(channel=0)
        num_rows = self._blocks.num_ranks * len(x)
        rows, own_ids, own_weights, slots = (
            part[: num_rows * size].view(num_rows, size)
            for part, size in zip(self._parts, self._row_sizes(), strict=True)
        )
        place_slots(experts(rows, ExpertRoutes(own_ids, own_weights)), slots)
        self._handle.barrier(channel=1)
        return sum_peers(ids, self._peers, self._blocks, self._rank, x)

    def _row_sizes(self) -> tuple[int, int, int, int]:
        """Return the elements of a row of each part of the memory."""
        hidden, chosen, _ = self._sizes
        return hidden, chosen, chosen, chosen * hidden
