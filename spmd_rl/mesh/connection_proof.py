"""Proof that every connection of a process group leads to a rank of this start.

gloo listens on a port that any process of the host can dial, and takes whoever dials first for the
rank that it waits for. On one machine each rank therefore shows the others that it can read the
private file in which they met.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from spmd_rl.errors import SpmdError
from spmd_rl.mesh.world import World, open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEY = "spmd_rl/key"


def prove(world: World, group: ProcessGroup | None = None) -> None:
    """Exchange proofs over each connection of a new group, by default that of the world, before
    anything else does.

    Ranks: all of the group.
    Blocks: until each has called; the deadline of the call that this is part of ends it.
    Raises: SpmdError when another process is at the other end of a connection.
    """
    import torch
    import torch.distributed as dist

    group = group or dist.distributed_c10d._get_default_group()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != world.rank]
    has_gloo = torch.device("cpu") in group._device_types
    if world.num_nodes > 1 or not peers or not has_gloo:
        return
    key = open_store(world).compare_set(KEY, "", secrets.token_hex(32))
    theirs = {rank: torch.zeros(hashlib.sha256().digest_size, dtype=torch.uint8) for rank in peers}
    ours = {
        rank: torch.tensor([*_proof(key, group, world.rank, rank)], dtype=torch.uint8)
        for rank in peers
    }
    under_way = [dist.irecv(proof, rank, group) for rank, proof in theirs.items()]
    under_way += [dist.isend(proof, rank, group) for rank, proof in ours.items()]
    for one in filter(None, under_way):
        one.wait()
    for rank, proof in theirs.items():
        if not hmac.compare_digest(proof.numpy().tobytes(), _proof(key, group, rank, world.rank)):
            raise SpmdError(
                f"another process has taken the place of rank {rank} in a connection to rank {world.rank}"
            )


def _proof(key: bytes, group: ProcessGroup, sender: int, receiver: int) -> bytes:
    """What only one who holds the key can say, of this connection in this direction alone."""
    return hmac.digest(key, f"{group.group_name}: {sender} to {receiver}".encode(), "sha256")
