"""Executor of a weight plan: it copies within a process, and sends packed buckets between ranks.

The source casts the boxes for one peer and packs them into buckets. A round is at most one send and
one receive per peer. Both ends cut the same buckets from the same plan, so they exchange no sizes.
While the buckets of a round are on their way, those of the next are packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.weights.delivery import DeliveredMoves, Delivery
from spmd_rl.weights.ends import LocalEnds, Shared, WeightSink, WeightSource
from spmd_rl.weights.packing import PackedBucket, aligned
from spmd_rl.weights.plan.moves import ROUND_BYTES, Move, Traffic

Buckets = dict[int, list[list[Move]]]  # by peer rank, in rounds


def alias(source: WeightSource, sink: WeightSink, rank: int) -> Shared:
    """Have the sink use the source's memory where both have the same box; return these pieces.

    Call it once, before graphs are captured over the sink. Later updates of the source need no
    push. The sink decides whether it can use memory of that dtype and device.
    """
    boxes = {(piece.name, piece.box) for piece in source.layout(rank).pieces}
    shared = set()
    for piece in sink.layout(rank).pieces:
        key = piece.name, piece.box
        if key in boxes and piece.box.num_elements:
            memory = source.view(*key)
            if memory is not None and sink.share(*key, memory):
                shared.add(key)
    return frozenset(shared)


class Executor:
    """Carries out this rank's moves of a plan, which replace the weights of its sink.

    Copies are prepared in the first run, where sink and source allow it: a later run is then a few
    launches for each flush or bucket, however many tensors there are.
    """

    def __init__(
        self, moves: Sequence[Move], ends: LocalEnds, bucket_bytes: int = ROUND_BYTES
    ) -> None:
        rank = ends.rank
        self._ends = ends
        outgoing = _buckets([move for move in moves if move.dst != rank], "dst", bucket_bytes)
        incoming = _buckets([move for move in moves if move.src != rank], "src", bucket_bytes)
        self._rounds = _rounds(outgoing, incoming)
        local = [move for move in moves if move.src == rank == move.dst]
        copied = [move for move in local if (move.name, move.into) not in ends.shared]
        self._copied = [DeliveredMoves(copied)] if copied else []  # as the last run delivered them
        num_copied = _num_bytes(copied)
        self._traffic = Traffic(
            _num_bytes(local) - num_copied,
            num_copied,
            _total(outgoing),
            _total(incoming),
        )
        self._receives = bool(copied or incoming)

    @torch.no_grad()
    def run(self, group: dist.ProcessGroup | None) -> Traffic:
        """Push once. `group` holds all ranks that the plan names; None if no move crosses ranks.

        Ranks: every rank that the plan names, together.
        Blocks: until this rank's sends and receives are done; the group's timeout ends it.
        """
        delivery = Delivery(self._ends.the_sink()) if self._receives else None
        exchanges = (_Exchange(one, self._ends, group) for one in self._rounds)
        under_way = next(exchanges, None)
        if delivery is not None:
            self._copy(delivery)
        while under_way is not None:
            following = next(exchanges, None)  # packed and started meanwhile
            under_way.finish(delivery)
            under_way = following
        return self._traffic

    def _copy(self, delivery: Delivery) -> None:
        """Copy the boxes that both ends of this process hold, and flush them."""
        for delivered in self._copied:
            delivery.repeat(self._ends.the_source(), delivered)
        delivery.flush()
        self._copied = delivery.delivered


def execute(
    moves: Sequence[Move],
    ends: LocalEnds,
    group: dist.ProcessGroup | None,
    bucket_bytes: int = ROUND_BYTES,
) -> Traffic:
    """Carry out the moves once, as `Executor.run` does."""
    return Executor(moves, ends, bucket_bytes).run(group)


@dataclass(frozen=True)
class _Round:
    """What a rank sends and receives at once. A bucket that several peers want alike is one."""

    sends: list[tuple[PackedBucket, list[int]]]  # buckets, and the peers that each goes to
    receives: dict[int, PackedBucket]  # by peer


def _rounds(outgoing: Buckets, incoming: Buckets) -> list[_Round]:
    count = max(
        (len(buckets) for one in (outgoing, incoming) for buckets in one.values()), default=0
    )
    rounds = []
    for index in range(count):
        peers: dict[tuple[object, ...], tuple[list[Move], list[int]]] = {}
        for peer, bucket in _pick(outgoing, index).items():
            content = tuple((move.name, move.box, move.dtype) for move in bucket)
            peers.setdefault(content, (bucket, []))[1].append(peer)
        sends = [(PackedBucket(bucket), to) for bucket, to in peers.values()]
        receives = {peer: PackedBucket(one) for peer, one in _pick(incoming, index).items()}
        rounds.append(_Round(sends, receives))
    return rounds


def _num_bytes(moves: Iterable[Move]) -> int:
    return sum(move.num_bytes for move in moves)


def _pick(buckets: Buckets, index: int) -> dict[int, list[Move]]:
    return {peer: rounds[index] for peer, rounds in sorted(buckets.items()) if index < len(rounds)}


def _total(buckets: Buckets) -> int:
    return sum(_num_bytes(bucket) for rounds in buckets.values() for bucket in rounds)


def _buckets(moves: Iterable[Move], peer: str, limit_bytes: int) -> Buckets:
    """Cut moves, in plan order, into buckets for each peer rank.

    A bucket has at most `limit_bytes`, unless a single row of a tensor is larger.
    """
    buckets: Buckets = defaultdict(list)
    last_bucket_bytes: dict[int, int] = defaultdict(int)
    for move in moves:
        rank = getattr(move, peer)
        for part in _split_rows(move, limit_bytes):
            size = aligned(part.num_bytes)
            if not buckets[rank] or last_bucket_bytes[rank] + size > limit_bytes:
                buckets[rank].append([])
                last_bucket_bytes[rank] = 0
            buckets[rank][-1].append(part)
            last_bucket_bytes[rank] += size
    return dict(buckets)


def _split_rows(move: Move, limit_bytes: int) -> Iterator[Move]:
    """Yield the move itself, or moves of blocks of its rows that each fit the limit."""
    if move.num_bytes <= limit_bytes or not move.box.extent:
        yield move
        return
    step = max(1, limit_bytes * move.box.extent[0] // move.num_bytes)
    for block in move.box.row_blocks(step):
        yield replace(move, box=block)


class _Exchange:
    """A round that is under way: its buckets are packed, and sent from the start on."""

    def __init__(self, one: _Round, ends: LocalEnds, group: dist.ProcessGroup | None) -> None:
        self._incoming = one.receives
        self._sends: dict[int, Tensor] = {}
        for bucket, peers in one.sends:
            self._sends |= dict.fromkeys(peers, bucket.pack(ends))
        self._receives = {
            peer: bucket.new_buffer(ends.device) for peer, bucket in one.receives.items()
        }
        self._works = _start(self._sends, self._receives, group)

    def finish(self, delivery: Delivery | None) -> None:
        """Wait for the buckets, and deliver those that came."""
        for work in self._works:
            work.wait()
        if delivery is not None:
            for peer, bucket in self._incoming.items():
                delivery.put_bucket(bucket, self._receives[peer])


def send_and_receive(
    sends: dict[int, Tensor], receives: dict[int, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send and receive one tensor per peer rank.

    Ranks: both of each pair. Blocks: until all are done; the group's timeout ends it.
    """
    for work in _start(sends, receives, group):
        work.wait()


def _start(
    sends: dict[int, Tensor], receives: dict[int, Tensor], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start to send and to receive one tensor per peer rank; the tensors are kept until the end."""
    operations = [
        dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sorted(sends.items())
    ]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in receives.items()]
    return dist.batch_isend_irecv(operations) if operations else []
