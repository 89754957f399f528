"""A SymmGather of each of several ranks, for Triton's interpreter.

Ranks are threads of one process, and their memory is that of the host. One rank runs at a time,
from one barrier to the next.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from spmd_rl.kernels.moe import peer_triton
from spmd_rl.kernels.moe.expert_gather import SlotRows
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.symm_gather import RowSizes, SymmGather

peer_triton.BLOCK = 32


class Turns:
    """Which rank runs: each until it waits for all others."""

    def __init__(self, num_ranks: int) -> None:
        self.running = threading.Lock()
        self._barrier = threading.Barrier(num_ranks)
        self.memory: list[Tensor] = []

    def barrier(self, channel: int = 0) -> None:
        self.running.release()
        self._barrier.wait()
        self.running.acquire()

    def rendezvous(self, memory: Tensor, group: Any) -> Any:
        self.memory.append(memory)
        self.barrier()
        pointers = [one.data_ptr() for one in self.memory]
        return SimpleNamespace(buffer_ptrs=pointers, barrier=self.barrier)


def of_experts(weights: Tensor, rank: int, num_own: int) -> Any:
    """Experts that scale rows: weights [E, C] of all experts."""

    def given(x: Tensor, routes: ExpertRoutes) -> SlotRows:
        ids, per_token = routes.ids.flatten(), routes.ids.shape[1]
        slots = ids.argsort(stable=True)
        tokens, own = slots // per_token, ids[slots]
        y = torch.full((len(ids), x.shape[1]), torch.nan, dtype=x.dtype)
        count = int((own < num_own).sum())
        scale = weights[rank * num_own + own[:count]]
        scale = scale * routes.weights.flatten()[slots[:count], None]
        y[:count] = (x[tokens[:count]].float() * scale).to(x.dtype)
        rows = torch.full_like(ids, -1)
        rows[slots[:count]] = torch.arange(count)
        return SlotRows(y, rows.view_as(routes.ids).int())

    return given


def gathered(x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor, layers: int) -> Tensor:
    """What several layers give, one behind the other.

    Shape: x [P, T, C], ids and weights [P, T, K], experts [E, C]; returns [P, T, C].
    """
    num_ranks, num_rows, columns = x.shape
    turns, out = Turns(num_ranks), torch.empty_like(x)
    symmetric.empty = lambda *size, dtype, device: torch.empty(size, dtype=dtype)
    symmetric.rendezvous = turns.rendezvous
    torch.cuda.current_device = lambda: 0
    order = [threading.Event() for _ in range(num_ranks + 1)]

    def run(rank: int) -> None:
        order[rank].wait()
        turns.running.acquire()
        order[rank + 1].set()
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks)
        sizes = RowSizes(columns, ids.shape[2], x.dtype)
        gather = SymmGather(group, len(experts), num_rows + 2, sizes)
        own, rows = of_experts(experts, rank, len(experts) // num_ranks), x[rank]
        routes = ExpertRoutes(ids[rank], weights[rank])
        for _ in range(layers):
            rows = gather.run(rows, routes, own)
            if rank == 0:  # while others read its slots
                gather.rehearsal().run(rows + 1, routes, own)
        out[rank] = rows
        turns.running.release()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for one in ranks:
        one.start()
    order[0].set()
    for one in ranks:
        one.join()
    return out
