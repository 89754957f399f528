"""Proof that every connection of a process group leads to a rank of the same start of the run.

gloo listens on a port that any process of the host can connect to. It takes the first process that
connects for the rank that it waits for. On one machine, each rank therefore proves to the others
that it can read the private file in which the ranks met.
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

STORE_KEY = "spmd_rl/key"


def prove(world: World, group: ProcessGroup | None = None) -> None:
    """Exchange proofs over each connection of a new group, which is that of the world by default.

    Call it before the group is used for anything else.

    Ranks: all of the group.
    Blocks: until each has called; the deadline of the controller's call ends it.
    Raises: SpmdError when another process is at the other end of a connection.
    """
    import torch
    import torch.distributed as dist

    group = group or dist.distributed_c10d._get_default_group()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != world.rank]
    has_gloo = torch.device("cpu") in group._device_types
    if world.num_nodes > 1 or not peers or not has_gloo:
        return
    key = open_store(world).compare_set(STORE_KEY, "", secrets.token_hex(32))
    num_bytes = hashlib.sha256().digest_size
    received = {rank: torch.zeros(num_bytes, dtype=torch.uint8) for rank in peers}
    sent = {
        rank: torch.tensor([*_proof(key, group, world.rank, rank)], dtype=torch.uint8)
        for rank in peers
    }
    works = [dist.irecv(proof, rank, group) for rank, proof in received.items()]
    works += [dist.isend(proof, rank, group) for rank, proof in sent.items()]
    for work in filter(None, works):
        work.wait()
    for rank, proof in received.items():
        if not hmac.compare_digest(proof.numpy().tobytes(), _proof(key, group, rank, world.rank)):
            raise SpmdError(
                f"another process has taken the place of rank {rank} "
                f"in a connection to rank {world.rank}"
            )


def _proof(key: bytes, group: ProcessGroup, sender: int, receiver: int) -> bytes:
    """Return the proof that the sender knows the key, for one direction of one connection."""
    return hmac.digest(key, f"{group.group_name}: {sender} to {receiver}".encode(), "sha256")
