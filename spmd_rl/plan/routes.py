"""What one push of weights moves between which ranks, for worlds of thousands of them.

The moves of `weights.plan` from rows that a trainer shards to whole copies, without naming one by
one the moves that grow with the square of the world: a destination's shards are chosen all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.mesh.split import Placement
from spmd_rl.weights.layout import ITEM_BYTES, Dims, chunk_box
from spmd_rl.weights.plan import BUCKET_BYTES


@dataclass(frozen=True)
class Routes:
    """Shape: `sizes` is [world, world], the bytes that a push moves from the rank of a row to that
    of a column.
    """

    sizes: NDArray[np.int64]

    @staticmethod
    def none(world_size: int) -> Routes:
        """Where nothing is pushed."""
        return Routes(np.zeros((world_size, world_size), np.int64))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.sizes))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The pairs of source and destination, in order."""
        return ((int(source), int(target)) for source, target in np.argwhere(self.sizes))

    def __getitem__(self, pair: tuple[int, int]) -> int:
        return int(self.sizes[pair])

    @property
    def within_bytes(self) -> int:
        """What stays on its rank."""
        return int(self.sizes.trace())

    @property
    def between_bytes(self) -> int:
        """What crosses between ranks."""
        return int(self.sizes.sum()) - self.within_bytes

    def num_peers(self, rank: int) -> int:
        """How many other ranks it sends to or receives from."""
        meets = (self.sizes[rank] > 0) | (self.sizes[:, rank] > 0)
        return int(np.count_nonzero(meets)) - int(meets[rank])

    def bucket_bytes(self, rank: int) -> int:
        """What it packs at once for those it sends to, and for those it receives from."""
        own = min(self[rank, rank], BUCKET_BYTES)
        sent, received = (
            int(np.minimum(line, BUCKET_BYTES).sum())
            for line in (self.sizes[rank], self.sizes[:, rank])
        )
        return sent + received - 2 * own


def push_routes(
    train: Placement, infer: Placement, tensors: Mapping[Dims, int], dtype: str, world_size: int
) -> Routes:
    """The routes of a push to whole copies in `dtype`; `tensors` says how many there are of each
    shape.

    The plan is made for one tensor of each shape, and counted as often as the shape occurs.
    """
    num_shards = train.axes["fsdp"]
    holders = np.array(train.ranks).reshape(-1, num_shards)
    routes = Routes.none(world_size)
    for shape, count in tensors.items():
        boxes = [chunk_box(shape, part, num_shards) for part in range(num_shards)]
        shard_bytes = np.array([box.num_elements * ITEM_BYTES[dtype] for box in boxes])
        for rank, sources in _sources(holders, infer.ranks):
            routes.sizes[sources, rank] += shard_bytes * count
    return routes


def _sources(
    holders: NDArray[np.int64], ranks: tuple[int, ...]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """For each of `ranks` in turn, who sends it which shard: itself, else those that hold it, in
    turns.

    Shape: `holders` is [replicas, shards], what is yielded [shards].
    """
    num_replicas, num_shards = holders.shape
    turn, shards = np.zeros(num_shards, np.int64), np.arange(num_shards)
    for rank in ranks:
        senders = holders[turn % num_replicas, shards]
        held = (holders == rank).any(axis=0)
        yield rank, np.where(held, rank, senders)
        turn += ~held
