"""Running a plan: nothing where storage is shared, a cast copy within a process, packed buckets
between ranks.

Between ranks the boxes for one peer are cast and packed into buckets at the source, so that a round
is at most one send and one receive per peer. Both ends cut the same buckets from the same plan; no
sizes are exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan import BUCKET_BYTES, Move, Plan

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Traffic:
    """What one rank did in one push."""

    aliased_bytes: int
    copied_bytes: int
    sent_bytes: int
    received_bytes: int


def alias(dst: LocalTensors, src: LocalTensors) -> int:
    """Point each tensor of `dst` at the storage of `src` where both hold the same box, dtype and
    device.

    Done once: later updates of the source are seen without a push. Before graphs are captured over
    `dst`. Returns the bytes now shared.
    """
    shared = 0
    for name, ours in dst.items():
        theirs = src.get(name)
        if theirs is None or (ours.box, ours.dtype, ours.local.device) != (
            theirs.box,
            theirs.dtype,
            theirs.local.device,
        ):
            continue
        ours.local.data = theirs.local.detach()
        shared += ours.local.nbytes
    return shared


@torch.no_grad()
def execute(
    plan: Plan,
    rank: int,
    src: LocalTensors | None,
    dst: LocalTensors | None,
    group: dist.ProcessGroup | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Traffic:
    """Carry out this rank's moves of `plan`, overwriting the tensors of `dst` in place.

    Ranks: every rank that the plan names, together; `group` holds them all (None where no move
    crosses ranks).
    Blocks: until this rank's sends and receives are done; the group's timeout ends it.
    """
    local = [move for move in plan.moves if move.src == rank == move.dst]
    aliased = sum(move.num_bytes for move in local if not _copy(move, src, dst))
    outgoing = _buckets(
        (move for move in plan.moves if move.src == rank != move.dst), "dst", bucket_bytes
    )
    incoming = _buckets(
        (move for move in plan.moves if move.dst == rank != move.src), "src", bucket_bytes
    )
    num_rounds = max(
        (len(buckets) for buckets in [*outgoing.values(), *incoming.values()]), default=0
    )
    for index in range(num_rounds):
        _exchange(_pick(outgoing, index), _pick(incoming, index), src, dst, group)
    return Traffic(
        aliased_bytes=aliased,
        copied_bytes=sum(move.num_bytes for move in local) - aliased,
        sent_bytes=_total(outgoing),
        received_bytes=_total(incoming),
    )


def _view(held: LocalTensors | None, move: Move) -> Tensor:
    if held is None:
        raise ValueError(f"the plan has this rank hold '{move.name}', but it was given nothing")
    one = held[move.name]
    return one.local.detach()[move.box.within(one.box)] if move.box.extent else one.local.detach()


def _copy(move: Move, src: LocalTensors | None, dst: LocalTensors | None) -> bool:
    """Copy one box within the process; False where both sides are the same memory."""
    source, target = _view(src, move), _view(dst, move)
    if source.data_ptr() == target.data_ptr() and source.dtype == target.dtype:
        return False
    target.copy_(source)
    return True


def _pick(buckets: dict[int, list[list[Move]]], index: int) -> dict[int, list[Move]]:
    return {peer: rounds[index] for peer, rounds in sorted(buckets.items()) if index < len(rounds)}


def _total(buckets: dict[int, list[list[Move]]]) -> int:
    return sum(
        move.num_bytes for rounds in buckets.values() for bucket in rounds for move in bucket
    )


def _buckets(moves: Iterable[Move], peer: str, limit_bytes: int) -> dict[int, list[list[Move]]]:
    """Moves by peer, cut in plan order into buckets of at most `limit_bytes` (one row of a tensor
    may exceed it).
    """
    buckets: dict[int, list[list[Move]]] = defaultdict(list)
    filled: dict[int, int] = defaultdict(int)
    for move in moves:
        rank = getattr(move, peer)
        for part in _rows(move, limit_bytes):
            size = _aligned(part.num_bytes)
            if not buckets[rank] or filled[rank] + size > limit_bytes:
                buckets[rank].append([])
                filled[rank] = 0
            buckets[rank][-1].append(part)
            filled[rank] += size
    return dict(buckets)


def _rows(move: Move, limit_bytes: int) -> Iterator[Move]:
    """The move itself, or blocks of its rows that each fit the limit."""
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
    src: LocalTensors | None,
    dst: LocalTensors | None,
    group: dist.ProcessGroup | None,
) -> None:
    """One round: pack, at most one send and one receive per peer, unpack."""
    sends = {peer: _packed(bucket, src) for peer, bucket in outgoing.items()}
    receives = {peer: _empty(bucket, dst) for peer, bucket in incoming.items()}
    operations = [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends.items()]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in receives.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for peer, bucket in incoming.items():
        for move, slot in _slots(bucket, receives[peer]):
            _view(dst, move).copy_(slot)


def _packed(bucket: list[Move], src: LocalTensors | None) -> Tensor:
    buffer = _empty(bucket, src)
    for move, slot in _slots(bucket, buffer):
        slot.copy_(_view(src, move))
    return buffer


def _empty(bucket: list[Move], held: LocalTensors | None) -> Tensor:
    size = sum(_aligned(move.num_bytes) for move in bucket)
    return torch.empty(size, dtype=torch.uint8, device=_view(held, bucket[0]).device)


def _slots(bucket: list[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Each move of a bucket with its place in the buffer, as a tensor of the box's extent."""
    start = 0
    for move in bucket:
        flat = buffer[start : start + move.num_bytes].view(getattr(torch, move.dtype))
        yield move, flat.view(move.box.extent)
        start += _aligned(move.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
