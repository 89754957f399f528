"""Executor of a weight plan: it copies within a process, and sends packed buckets between ranks.

The source casts the boxes for one peer and packs them into buckets. A round is at most one send and
one receive per peer. Both ends cut the same buckets from the same plan, so they exchange no sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan import BUCKET_BYTES, Move, Traffic, WeightPlan

ALIGN_BYTES = 16


def alias(dst: LocalTensors, src: LocalTensors) -> int:
    """Point each tensor of `dst` at the memory of `src` where both have the same box, dtype and
    device; return the number of bytes that are now shared.

    Call it once, before graphs are captured over `dst`. Later updates of the source need no push.
    """
    shared_bytes = 0
    for name, target in dst.items():
        source = src.get(name)
        if source is not None and _same_kind(target, source):
            target.local.data = source.local.detach()
            shared_bytes += target.local.nbytes
    return shared_bytes


@torch.no_grad()
def execute(
    plan: WeightPlan,
    rank: int,
    src: LocalTensors | None,
    dst: LocalTensors | None,
    group: dist.ProcessGroup | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Traffic:
    """Carry out this rank's moves of `plan`, which overwrite the tensors of `dst` in place.

    `group` holds all ranks that the plan names; it may be None where no move crosses ranks.
    Ranks: every rank that the plan names, together.
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


def _same_kind(target: LocalTensor, source: LocalTensor) -> bool:
    return (
        target.box == source.box
        and target.dtype == source.dtype
        and target.local.device == source.local.device
    )


def _view(tensors: LocalTensors | None, move: Move) -> Tensor:
    """Return the box of a move as a view of the local memory."""
    if tensors is None:
        raise ValueError(f"the plan needs '{move.name}' on this rank, which has no tensors")
    tensor = tensors[move.name]
    memory = tensor.local.detach()
    return memory[move.box.within(tensor.box)] if move.box.extent else memory


def _copy(move: Move, src: LocalTensors | None, dst: LocalTensors | None) -> bool:
    """Copy one box within the process; return False where both ends are the same memory."""
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
    """Cut moves, in plan order, into buckets for each peer rank.

    A bucket has at most `limit_bytes`, unless a single row of a tensor is larger.
    """
    buckets: dict[int, list[list[Move]]] = defaultdict(list)
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
    src: LocalTensors | None,
    dst: LocalTensors | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Run one round: pack, send and receive at most one bucket per peer, unpack."""
    sends = {peer: _pack(bucket, src) for peer, bucket in outgoing.items()}
    receives = {peer: _new_buffer(bucket, dst) for peer, bucket in incoming.items()}
    operations = [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends.items()]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in receives.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for peer, bucket in incoming.items():
        for move, slot in _slots(bucket, receives[peer]):
            _view(dst, move).copy_(slot)


def _pack(bucket: list[Move], src: LocalTensors | None) -> Tensor:
    buffer = _new_buffer(bucket, src)
    for move, slot in _slots(bucket, buffer):
        slot.copy_(_view(src, move))
    return buffer


def _new_buffer(bucket: list[Move], tensors: LocalTensors | None) -> Tensor:
    size = sum(_aligned(move.num_bytes) for move in bucket)
    return torch.empty(size, dtype=torch.uint8, device=_view(tensors, bucket[0]).device)


def _slots(bucket: list[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Yield each move of a bucket with its part of the buffer, as a tensor of the box's extent."""
    start = 0
    for move in bucket:
        flat = buffer[start : start + move.num_bytes].view(getattr(torch, move.dtype))
        yield move, flat.view(move.box.extent)
        start += _aligned(move.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
