"""Rows that go to and from the memory of peers, in one process, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.moe import peer_triton
from spmd_rl.kernels.moe.expert_gather import ExpertBlocks, SlotRows
from spmd_rl.kernels.moe.peer_triton import PeerTables, place_slots, push, sum_peers
from spmd_rl.kernels.moe.router import ExpertRoutes

peer_triton.BLOCK = 32


def pushed(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> list[list[Tensor]]:
    """Rows, ids and weights that each rank has when all have pushed.

    Shape: x [P, T, C], ids and weights [P, T, K].
    """
    blocks = ExpertBlocks(num_experts, len(x))
    memory = [
        [torch.full_like(one.flatten(0, 1), -9) for one in (x, ids, weights)] for _ in range(len(x))
    ]
    tables = [torch.tensor([one.data_ptr() for one in part]) for part in zip(*memory, strict=True)]
    peers = PeerTables(*tables, tables[0])
    for rank in range(len(x)):
        push(x[rank], ExpertRoutes(ids[rank], weights[rank]), peers, blocks, rank)
    return memory


def summed(ids: Tensor, given: list[tuple[Tensor, Tensor]], num_experts: int) -> Tensor:
    """Each rank's sums, where `given` has what each rank's experts gave, and the row of each slot.

    Shape: ids [P, T, K], y [S, C] and rows [P T, K]; returns [P, T, C].
    """
    blocks, (num_ranks, num_rows, per_token) = ExpertBlocks(num_experts, len(ids)), ids.shape
    columns = given[0][0].shape[1]
    memory = [
        torch.full((num_ranks * num_rows, per_token, columns), torch.nan, dtype=torch.float16)
        for _ in given
    ]
    for own, out in zip(given, memory, strict=True):
        place_slots(SlotRows(*own), out)
    table = torch.tensor([one.data_ptr() for one in memory])
    peers, like = PeerTables(*[table] * 4), given[0][0].new_empty(num_rows, columns)
    return torch.stack([sum_peers(one, peers, blocks, at, like) for at, one in enumerate(ids)])
