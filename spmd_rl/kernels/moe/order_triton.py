"""Order of slots by expert on NVIDIA GPUs, and the tiles of their rows, without the host.

Rows of one expert are in the order of their tokens. A slot of no expert, which padding has, comes
behind all others. Each program finds one expert's slots among a chunk of all.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

CHUNK = 4096  # slots of a program
# Each thread of a program has slots and bins of its own, so that no count is of copies.
LEAST_CHUNK, LEAST_BINS = 512, 32
TILE_BLOCK = 16  # entries of the list of tiles that a program writes at once
CHUNKS_AT_ONCE = 16


@dataclass(frozen=True)
class DeviceOrder:
    """Slots in the order of their experts, and tiles of their rows, all on the device.

    Shape: int32; `slots` [S]: the slot of each row; `rows` [T, K]: the row of each slot, -1 for a
    slot of no expert; `starts` [E + 1]: the first row of each expert, and the end of the last;
    `tiles` [1 + 2 max_tiles]: the number of tiles, the expert of each, and its first row.
    The slots of one token are in order already, and each is a tile. Then kernels read all of it
    from the token's `ids`, which every list is, and no launch makes an order.
    """

    slots: Tensor
    rows: Tensor
    starts: Tensor
    tiles: Tensor
    tile_rows: int
    num_experts: int
    is_one_token: bool = False

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def experts_per_token(self) -> int:
        return self.rows.shape[1]

    @property
    def max_tiles(self) -> int:
        return self.num_slots if self.is_one_token else len(self.tiles) // 2


def most_tiles(num_slots: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles there are at most: an expert's last one may have few rows."""
    return num_slots // tile_rows + min(num_slots, num_experts)


def order_on_device(ids: Tensor, num_experts: int, tile_rows: int) -> DeviceOrder:
    """Order the slots of `ids` [T, K] int64, where `num_experts` is no expert."""
    num_slots = ids.numel()
    made = torch.empty(2 * num_slots + num_experts + 1, dtype=torch.int32, device=ids.device)
    slots, rows, starts = made.split([num_slots, num_slots, num_experts + 1])
    num_tiles = most_tiles(num_slots, num_experts, tile_rows)
    tiles = torch.empty(1 + 2 * num_tiles, dtype=torch.int32, device=ids.device)
    bins = max(triton.next_power_of_2(num_experts + 1), LEAST_BINS)
    chunks = triton.cdiv(num_slots, CHUNK)
    chunk = CHUNK if chunks > 1 else max(triton.next_power_of_2(num_slots), LEAST_CHUNK)
    bases = starts
    if chunks > 1:
        counts, bases = torch.empty(2, chunks, bins, dtype=torch.int32, device=ids.device)
        _count[(chunks,)](ids, counts, num_slots, num_experts, bins, CHUNK, **overlapping())
        _find_bases[(1,)](counts, bases, chunks, bins, CHUNKS_AT_ONCE, **overlapping())
    _place[(num_experts + 1, chunks)](
        ids, bases, slots, rows, starts, tiles, num_slots, num_experts, num_tiles,
        chunks > 1, bins, chunk, tile_rows, TILE_BLOCK, num_warps=8 if chunk > LEAST_CHUNK else 4,
        **overlapping(),
    )  # fmt: skip
    return DeviceOrder(slots, rows.view(ids.shape), starts, tiles, tile_rows, num_experts)


def order_of_token(ids: Tensor, num_experts: int, tile_rows: int) -> DeviceOrder:
    """Return the order of a single token's slots, for `grouped_matmul` and `sum_slots` alone.

    Shape: ids [1, K] int64, ascending.
    """
    slots = ids.view(-1)
    return DeviceOrder(slots, ids, slots, slots, tile_rows, num_experts, is_one_token=True)


@triton.jit
def _experts_of(ids, slot, num_slots, num_experts) -> tl.tensor:
    return tl.load(ids + slot, mask=slot < num_slots, other=num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_experts"])
def _count(ids, counts, num_slots, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """Count each expert's slots in a chunk. What lies behind the last slot is no expert's."""
    wait()
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    found = tl.histogram(_experts_of(ids, slot, num_slots, num_experts), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["chunks"])
def _find_bases(counts, bases, chunks, BINS: tl.constexpr, AT_ONCE: tl.constexpr) -> None:
    """Find the first row of each expert's slots in each chunk."""
    wait()
    number = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)
        at, is_chunk = chunk[:, None] * BINS + number[None, :], (chunk < chunks)[:, None]
        total += tl.sum(tl.load(counts + at, mask=is_chunk, other=0), 0)
    base = tl.cumsum(total, 0) - total
    for first in range(0, chunks, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)
        at, is_chunk = chunk[:, None] * BINS + number[None, :], (chunk < chunks)[:, None]
        of_chunk = tl.load(counts + at, mask=is_chunk, other=0)
        before = tl.cumsum(of_chunk, 0) - of_chunk
        tl.store(bases + at, base[None, :] + before, mask=is_chunk)
        base += tl.sum(of_chunk, 0)


@triton.jit(do_not_specialize=["num_slots", "num_experts", "max_tiles"])
def _place(
    ids, bases, slots, rows, starts, tiles, num_slots, num_experts, max_tiles,
    CHUNKED: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write an expert's rows of a chunk and, in the first chunk, its entries of the other lists."""
    expert, chunk = tl.program_id(0), tl.program_id(1)
    slot, number = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BINS)
    wait()
    found = _experts_of(ids, slot, num_slots, num_experts)
    mine = (found == expert) & (slot < num_slots)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    if CHUNKED:
        base = tl.load(bases + chunk * BINS + expert)
        begins = tl.load(bases + number, mask=number <= num_experts, other=0)
        ends = tl.load(bases + number + 1, mask=number < num_experts, other=0)
        counts = tl.where(number < num_experts, ends - begins, 0)
    else:
        counts = tl.where(number < num_experts, tl.histogram(found, BINS), 0)
        base = tl.sum(tl.where(number < expert, counts, 0))
    row = base + rank
    tl.store(rows + slot, tl.where(expert < num_experts, row, -1), mask=mine)
    tl.store(slots + row, slot, mask=mine)
    if chunk == 0:
        tl.store(starts + expert, base)
        of_each = (counts + (TILE_M - 1)) // TILE_M
        first_tile = tl.sum(tl.where(number < expert, of_each, 0))
        if expert == num_experts:
            tl.store(tiles, first_tile)
        num_tiles = tl.sum(tl.where(number == expert, of_each, 0))
        for start in range(0, num_tiles, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            at = tiles + 1 + first_tile + entry
            tl.store(at, tl.zeros((BLOCK,), tl.int32) + expert, mask=entry < num_tiles)
            tl.store(at + max_tiles, base + entry * TILE_M, mask=entry < num_tiles)
