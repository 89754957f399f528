"""A SymmGather of each of several ranks (peer_ranks.py), for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.moe import peer_triton
from spmd_rl.kernels.moe.expert_gather import SlotRows
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.symm_gather import RowSizes, SymmGather
from tests.unit.kernels.peer_ranks import on_ranks

peer_triton.BLOCK = 32


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

    def run(group: Any) -> Tensor:
        rank, sizes = group.rank(), RowSizes(columns, ids.shape[2], x.dtype)
        gather = SymmGather(group, len(experts), num_rows + 2, sizes)
        own, rows = of_experts(experts, rank, len(experts) // num_ranks), x[rank]
        routes = ExpertRoutes(ids[rank], weights[rank])
        for _ in range(layers):
            rows = gather.run(rows, routes, own)
            if rank == 0:  # while others read its slots
                gather.rehearsal().run(rows + 1, routes, own)
        return rows

    return on_ranks(run, num_ranks)
