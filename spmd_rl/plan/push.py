"""Push of a run's weights as its placements show it: whom a rank talks to, and its buckets.

These are upper bounds: which of several copies sends a part is chosen when a run starts, from what
each rank holds (weights/plan/moves.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from spmd_rl.mesh.split import Placements
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.gpu_overhead import Peers
from spmd_rl.plan.needs import INFER, TRAIN, RunNeeds
from spmd_rl.train.cost.memory import dtype_on_gpu
from spmd_rl.weights.plan.layout import ITEM_BYTES, Dims
from spmd_rl.weights.plan.moves import ROUNDS_AT_ONCE, bucket_bytes


@dataclass(frozen=True)
class Push:
    """A push from the ranks `sources` to the ranks `sinks`.

    A tensor has at most `num_copies` among the sources, and a sink gets the weights from at most
    `num_shards` of them. `copy_bytes` are those of all weights as one engine gets them, and
    `shard_bytes` the most that a rank gives another.
    """

    sources: frozenset[int]
    sinks: frozenset[int]
    num_copies: int
    num_shards: int
    copy_bytes: int
    shard_bytes: int

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both ends, which share a communicator."""
        return tuple(sorted(self.sources | self.sinks))

    def num_sends(self, rank: int) -> int:
        """Return how many other ranks one sends weights to."""
        if rank not in self.sources:
            return 0
        num_beside = len(self.sinks - self.sources)
        within = self.sinks & self.sources if self.num_shards > 1 else frozenset[int]()
        return num_beside + len(within - {rank})

    def num_receives(self, rank: int) -> int:
        """Return how many other ranks one receives weights from."""
        return self.num_shards - (rank in self.sources) if rank in self.sinks else 0

    def peers(self, rank: int) -> Peers:
        """Return the ranks that one exchanges weights with, or digests of copies."""
        num_compared = self.num_copies - 1 if rank in self.sources else 0
        num_peers = self.num_sends(rank) + self.num_receives(rank) + num_compared
        return Peers(self.ranks, min(num_peers, len(self.ranks) - 1))

    def packed_bytes(self, rank: int) -> int:
        """Return the size of all buckets that a rank has at once, to send and to receive."""
        limit = ROUNDS_AT_ONCE * bucket_bytes(len(self.sources), len(self.sinks))
        num_buckets = self.num_sends(rank) + self.num_receives(rank)
        return num_buckets * min(limit, self.shard_bytes)


def push_of_run(placements: Placements, spec: ModelSpec, needs: RunNeeds) -> Push | None:
    """Return the push of a run; None where it has no trainer or no engine."""
    train, infer = placements.get(TRAIN), placements.get(INFER)
    trainer, engine = needs.trainer, needs.engine
    if train is None or infer is None or trainer is None or engine is None:
        return None
    is_fsdp2 = trainer.backend.kind == "fsdp2"
    train = train.of_shards if is_fsdp2 else train
    num_parts = num_shards = train.axes["fsdp"]
    num_copies = train.size // num_shards
    is_cut = num_copies > train.axes["dp"]  # along other axes too
    if is_cut and not is_fsdp2:
        num_parts, num_copies = 1, train.size
    if is_cut or max(one.axes.get("ep", 1) for one in (train, infer)) > 1:
        num_shards = train.size
    kinds = _kinds(spec, trainer.lora.of_engine, engine.weights, dtype_on_gpu(engine))
    copy_bytes, shard_bytes = (
        sum(
            -(-shape[0] // parts) * prod(shape[1:]) * ITEM_BYTES[dtype] * count
            for (shape, dtype), count in kinds.items()
        )
        for parts in (1, num_parts)  # of the rows of each weight; the largest part counts
    )
    ranks = frozenset(train.ranks), frozenset(infer.ranks)
    return Push(*ranks, num_copies, num_shards, copy_bytes, shard_bytes)


@lru_cache(8)
def _kinds(
    spec: ModelSpec, lora: LoraConfig, weights: WeightFormat, dtype: str
) -> Counter[tuple[Dims, str]]:
    """Return how many tensors of each shape and dtype are pushed: a mixture has tens of thousands.

    Scales of codes are not counted: they are at most a thirtieth of their codes.
    """
    coded = coded_shapes(spec, weights)
    return Counter(
        (FORMATS[weights].code_shape(coded[name]), FORMATS[weights].code_dtype)
        if name in coded
        else (shape, dtype)
        for name, shape in lora.trained_shapes(spec).items()
    )
