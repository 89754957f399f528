"""Receipts of a shard: what each of its ranks gave back or took again, as one answer of all."""

from __future__ import annotations

import msgspec

from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.offload.residency import Receipt


def of_shard(context: RoleContext, receipts: list[Receipt]) -> list[Receipt]:
    """Return the receipts of all ranks that share this rank's part of the data.

    Ranks: all of the shard. Blocks: until each has called.
    """
    blobs = context.all_gather_in_shard(msgspec.msgpack.encode(receipts))
    return [one for blob in blobs for one in msgspec.msgpack.decode(blob, type=list[Receipt])]
