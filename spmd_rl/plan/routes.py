"""Routes of a weight push: the bytes between each pair of ranks, for worlds of thousands of ranks.

They are the moves of `weights.plan` from a trainer's shards to whole copies. That plan lists moves
one by one, which grow with the square of the world; here a destination's shards are chosen at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.mesh.split import Placement
from spmd_rl.model.low_precision.coded_weights import WeightFormat, coded_shapes
from spmd_rl.model.spec import ModelSpec
from spmd_rl.types.code_layout import LAYOUTS, CodeLayout
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Dims, chunk_box, chunk_of_box
from spmd_rl.weights.plan.moves import ROUNDS_AT_ONCE, bucket_bytes


class Wanted(NamedTuple):
    """A kind of tensor: its shape, and what the ranks of one engine want of it, along tp.

    `given` are the boxes that FSDP2 shards, where a trainer's ranks along tp have such: one that
    all have, or one of each.
    """

    shape: Dims
    boxes: tuple[Box, ...]
    given: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Routes:
    """The bytes of one push between each pair of ranks.

    Shape: `sizes` is [world, world], from the rank of the row to that of the column. A bucket for
    one peer has up to `bucket_bytes`.
    """

    sizes: NDArray[np.int64]
    bucket_bytes: int

    @staticmethod
    def none(world_size: int) -> Routes:
        """Return the routes of a run that pushes nothing."""
        return Routes(np.zeros((world_size, world_size), np.int64), bucket_bytes=0)

    def __add__(self, other: Routes) -> Routes:
        """Return the routes of both, in one push."""
        return Routes(self.sizes + other.sizes, max(self.bucket_bytes, other.bucket_bytes))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.sizes))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the pairs of source and destination, in order."""
        return ((int(source), int(target)) for source, target in np.argwhere(self.sizes))

    def __getitem__(self, pair: tuple[int, int]) -> int:
        return int(self.sizes[pair])

    @property
    def within_bytes(self) -> int:
        """Bytes that stay on their rank."""
        return int(self.sizes.trace())

    @property
    def between_bytes(self) -> int:
        """Bytes that cross between ranks."""
        return int(self.sizes.sum()) - self.within_bytes

    def num_peers(self, rank: int) -> int:
        """Return how many other ranks a rank sends to or receives from."""
        is_peer = (self.sizes[rank] > 0) | (self.sizes[:, rank] > 0)
        return int(np.count_nonzero(is_peer)) - int(is_peer[rank])

    def packed_bytes(self, rank: int) -> int:
        """Return the size of all buckets that a rank has at once, to send and to receive."""
        of_peer = ROUNDS_AT_ONCE * self.bucket_bytes
        own = min(self[rank, rank], of_peer)
        sent, received = (
            int(np.minimum(line, of_peer).sum()) for line in (self.sizes[rank], self.sizes[:, rank])
        )
        return sent + received - 2 * own


def push_routes(
    train: Placement,
    infer: Placement,
    tensors: Mapping[Wanted, int],
    dtype: str,
    world_size: int,
    owners: Sequence[int] = (),
    takers: Sequence[int] = (),
) -> Routes:
    """Return the routes of a push to engines in `dtype`.

    `tensors` is the number of tensors of each kind: one of each is planned, and multiplied. They
    are sharded among `owners`, if given, as experts are. If `takers` are given, they alone of the
    engine's ranks want these tensors.
    """
    sizes = np.zeros((world_size, world_size), np.int64)
    for kind, count in tensors.items():
        holders, shards = _held(train, kind, owners)
        num_bytes = np.array([[_common(box, one) for one in shards] for box in kind.boxes])
        num_bytes *= ITEM_BYTES[dtype] * count
        for index, (rank, sources) in enumerate(_sources(holders, tuple(takers) or infer.ranks)):
            sizes[sources, rank] += num_bytes[index % len(kind.boxes)]
    return Routes(sizes, bucket_bytes(train.size, infer.size))


def _held(
    train: Placement, kind: Wanted, owners: Sequence[int]
) -> tuple[NDArray[np.int64], list[Box]]:
    """Return the ranks that have each shard of a tensor [replicas, shards], and the shards."""
    fsdp, given = train.axes["fsdp"], kind.given
    if given:
        ranks = np.array(train.ranks).reshape(-1, fsdp, train.axes["tp"])
        of_copies = ranks if len(given) > 1 else ranks.swapaxes(1, 2)
        shards = [chunk_of_box(box, part, fsdp) for part in range(fsdp) for box in given]
        return of_copies.reshape(-1, len(shards)), shards
    holders = np.array(train.ranks).reshape(-1, fsdp)
    if train.size > train.data_size:  # a model cut along tp or pp, copied along the data axes
        holders = np.array(train.shards)
    if owners:
        holders = np.array([owners])
    num_shards = holders.shape[1]
    return holders, [chunk_box(kind.shape, part, num_shards) for part in range(num_shards)]


def routes_of_experts(
    train: Placement,
    infer: Placement,
    spec: ModelSpec,
    dtype: str,
    world_size: int,
    weights: WeightFormat = "full",
) -> Routes:
    """Return the routes where ranks of the trainer, of engines or of both share experts."""
    sizes = (train.axes.get("ep", 1), infer.axes.get("ep", 1))
    routes = Routes.none(world_size)
    layout = LAYOUTS.get(weights)
    for codes, one in ((None, dtype), *([(layout, layout.code_dtype)] if layout else ())):
        others, experts = _parts(spec, *sizes, weights, codes)
        routes += push_routes(train, infer, others, one, world_size)
        for (part, taken), tensors in experts.items():
            ends = _copies(train, part), _copies(infer, taken)
            routes += push_routes(train, infer, tensors, one, world_size, *ends)
    return routes


def _copies(placement: Placement, part: int) -> tuple[int, ...]:
    """Return the ranks that have a part of the experts; none where each has all."""
    if placement.axes.get("ep", 1) == 1:
        return ()
    return placement.ranks_along(placement.ranks[part], ("edp",))


@lru_cache(64)
def _parts(
    spec: ModelSpec, num_given: int, num_taken: int, weights: WeightFormat, codes: CodeLayout | None
) -> tuple[Mapping[Wanted, int], Mapping[tuple[int, int], Mapping[Wanted, int]]]:
    """Return the number of tensors of each kind: of what is no expert, and of the experts by the
    part of the trainer that has them and that of the engine.

    They are those that are `codes`, or the others. Scales are not counted: they are at most a
    thirtieth of their codes.
    """
    coded = coded_shapes(spec, weights)
    shapes = spec.parameter_shapes()
    if codes is not None:
        kinds = {name: whole(codes.code_shape(shape)) for name, shape in coded.items()}
    else:
        kinds = {name: whole(shape) for name, shape in shapes.items() if name not in coded}
    given, taken = spec.expert_parts(num_given), spec.expert_parts(num_taken)
    experts: dict[tuple[int, int], Counter[Wanted]] = defaultdict(Counter)
    for name, part in given.items():
        if name in kinds:
            experts[part, taken[name]][kinds.pop(name)] += 1
    return Counter(kinds.values()), experts


def whole(shape: Dims) -> Wanted:
    """Return the kind of a tensor that every rank of an engine wants whole."""
    return Wanted(shape, (Box((0,) * len(shape), shape),))


def _common(box: Box, shard: Box) -> int:
    """Return the number of elements that a box has in common with a shard."""
    common = box.intersect(shard)
    return 0 if common is None else common.num_elements


def _sources(
    holders: NDArray[np.int64], ranks: tuple[int, ...]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each of `ranks` with the rank that sends it each shard.

    A rank sends its own shards to itself. The replicas send the others in rotation.
    Shape: `holders` is [replicas, shards], the yielded ranks [shards].
    """
    num_replicas, num_shards = holders.shape
    turn, shards = np.zeros(num_shards, np.int64), np.arange(num_shards)
    for rank in ranks:
        senders = holders[turn % num_replicas, shards]
        is_own = (holders == rank).any(axis=0)
        yield rank, np.where(is_own, rank, senders)
        turn += ~is_own
