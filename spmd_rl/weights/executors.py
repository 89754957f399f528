"""Executor of a weight plan: it copies within a process, and sends packed buckets between ranks.

The source casts the boxes for one peer and packs them into buckets. A round is at most one send and
one receive per peer. Both ends cut the same buckets from the same plan, so they exchange no sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.weights.delivery import DeliveredMoves, Delivery, copy_all
from spmd_rl.weights.ends import LocalEnds, Shared, WeightSink, WeightSource
from spmd_rl.weights.layout import Box
from spmd_rl.weights.plan import BUCKET_BYTES, Move, Traffic

ALIGN_BYTES = 16

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

    Copies within the process are prepared in the first run, where sink and source allow it: a later
    run is then a few launches for each flush, however many tensors there are.
    """

    def __init__(
        self, moves: Sequence[Move], ends: LocalEnds, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        rank = ends.rank
        self._ends = ends
        self._outgoing = _buckets([move for move in moves if move.dst != rank], "dst", bucket_bytes)
        self._incoming = _buckets([move for move in moves if move.src != rank], "src", bucket_bytes)
        local = [move for move in moves if move.src == rank == move.dst]
        copied = [move for move in local if (move.name, move.into) not in ends.shared]
        self._copied = [DeliveredMoves(copied)] if copied else []  # as the last run delivered them
        num_copied = _num_bytes(copied)
        self._traffic = Traffic(
            _num_bytes(local) - num_copied,
            num_copied,
            _total(self._outgoing),
            _total(self._incoming),
        )

    @torch.no_grad()
    def run(self, group: dist.ProcessGroup | None) -> Traffic:
        """Push once. `group` holds all ranks that the plan names; None if no move crosses ranks.

        Ranks: every rank that the plan names, together.
        Blocks: until this rank's sends and receives are done; the group's timeout ends it.
        """
        ends, delivery = self._ends, None
        if self._copied or self._incoming:
            delivery = Delivery(ends.the_sink())
            self._copy(delivery)
        for index in range(_num_rounds(self._outgoing, self._incoming)):
            outgoing, incoming = _pick(self._outgoing, index), _pick(self._incoming, index)
            _exchange(outgoing, incoming, ends, delivery, group)
        if delivery is not None:
            delivery.flush()
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
    bucket_bytes: int = BUCKET_BYTES,
) -> Traffic:
    """Carry out the moves once, as `Executor.run` does."""
    return Executor(moves, ends, bucket_bytes).run(group)


def _num_rounds(*directions: Buckets) -> int:
    return max((len(rounds) for buckets in directions for rounds in buckets.values()), default=0)


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
            size = _aligned(part.num_bytes)
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
    offset, extent = move.box.offset, move.box.extent
    step = max(1, limit_bytes * extent[0] // move.num_bytes)
    for start in range(0, extent[0], step):
        size = min(step, extent[0] - start)
        yield replace(move, box=Box((offset[0] + start, *offset[1:]), (size, *extent[1:])))


def _exchange(
    outgoing: dict[int, list[Move]],
    incoming: dict[int, list[Move]],
    ends: LocalEnds,
    delivery: Delivery | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Run one round: pack, send and receive at most one bucket per peer, deliver."""
    sends = {peer: _pack(bucket, ends) for peer, bucket in outgoing.items()}
    receives = {peer: _new_buffer(bucket, ends.device) for peer, bucket in incoming.items()}
    send_and_receive(sends, receives, group)
    if delivery is not None:
        for peer, bucket in incoming.items():
            for move, part in _parts(bucket, receives[peer]):
                delivery.put(move, part)
        delivery.copy()


def send_and_receive(
    sends: dict[int, Tensor], receives: dict[int, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send and receive one tensor per peer rank.

    Ranks: both of each pair. Blocks: until all are done; the group's timeout ends it.
    """
    operations = [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends.items()]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in receives.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _pack(bucket: list[Move], ends: LocalEnds) -> Tensor:
    source = ends.the_source()
    buffer = _new_buffer(bucket, ends.device)
    targets, views = [], []
    for move, part in _parts(bucket, buffer):
        view = source.view(move.name, move.box)
        if view is None:
            source.read(move.name, move.box, part)
        else:
            targets.append(part)
            views.append(view)
    copy_all(targets, views)
    return buffer


def _new_buffer(bucket: list[Move], device: torch.device) -> Tensor:
    size = sum(_aligned(move.num_bytes) for move in bucket)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _parts(bucket: list[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Yield each move of a bucket with its part of the buffer, as a tensor of the box's extent."""
    start = 0
    for move in bucket:
        flat = buffer[start : start + move.num_bytes].view(getattr(torch, move.dtype))
        yield move, flat.view(move.box.extent)
        start += _aligned(move.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
