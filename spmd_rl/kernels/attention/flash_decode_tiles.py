"""Which tile, a head of a sequence, a block of decoding's attention takes next.

Sequences differ in length, so a counter hands tiles out. One warp of a block takes the next one
while the last page of the current one is on its way, looks up what the others need to know of it,
and tells them when they have read that of the current one. Those who copy go on at once, those who
compute when they are done.
Source: dynamic persistent scheduling, as in FlashAttention-3 (Shah et al., 2024) and CUTLASS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.arch import WARP_SIZE
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack.cute_dsl_utils import ParamsBase

# the package's are lower
COPYING, COMPUTING, READ, WANTED = range(max(NamedBarrierFwd) + 1, max(NamedBarrierFwd) + 5)
LISTENERS = {COPYING: 2 * WARP_SIZE, COMPUTING: 4 * WARP_SIZE}  # threads that are told there


class Fixed:
    """An object that a loop of the kernel carries along unchanged."""

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self


class Told(Fixed):
    """What is told of a tile, in shared memory behind the queries' barriers: sequence, head, how
    many keys, and the page of the last of them. A sequence below 0 is the end.

    All listeners wait for `numbers`, at the barrier `where` their kind is told, and let each tile
    go once, after which they may change.
    """

    NUM_BYTES = 16

    def __init__(self, queries: Any, where: int) -> None:
        behind = cute.recast_ptr(queries.sync_object_full.get_barrier(0) + 2, dtype=Int32)
        self.slot = cute.make_tensor(behind, cute.make_layout(self.NUM_BYTES // 4))
        # of whatever sequence
        self.num_keys = cute.make_tensor(behind + 2, cute.make_layout(1, stride=0))
        self.where = where

    def numbers(self) -> tuple[Any, ...]:
        cute.arch.barrier(
            barrier_id=self.where, number_of_threads=LISTENERS[self.where] + WARP_SIZE
        )
        return tuple(self.slot[i] for i in range(self.NUM_BYTES // 4))

    def let_go(self) -> None:
        cute.arch.barrier_arrive(
            barrier_id=READ, number_of_threads=sum(LISTENERS.values()) + WARP_SIZE
        )

    def want_next(self) -> None:
        """For the whole warp that copies pages, once a tile."""
        cute.arch.barrier_arrive(barrier_id=WANTED, number_of_threads=2 * WARP_SIZE)

    @cute.jit  # type: ignore[untyped-decorator]
    def tell(self, *numbers: Any) -> None:
        """For the whole warp that tells, as what follows."""
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(numbers)):
                self.slot[i] = Int32(numbers[i])
        for where, threads in cutlass.const_expr(tuple(LISTENERS.items())):
            cute.arch.barrier_arrive(barrier_id=where, number_of_threads=threads + WARP_SIZE)

    def until_read(self) -> None:
        cute.arch.barrier(barrier_id=READ, number_of_threads=sum(LISTENERS.values()) + WARP_SIZE)

    def until_wanted(self) -> None:
        cute.arch.barrier(barrier_id=WANTED, number_of_threads=2 * WARP_SIZE)

    def get_current_work(self) -> Any:
        """The package's names, for its part."""
        sequence, head, _, _ = self.numbers()
        return WorkTileInfo((Int32(0), head, sequence, Int32(0)), sequence >= 0)

    initial_work_tile_info = get_current_work

    def advance_to_next_work(self) -> None:
        """The next call of `get_current_work` does."""


@dataclass
class Tiles(ParamsBase):  # type: ignore[misc]
    """A launch's tiles, the heads of a sequence side by side.

    The block of index i begins with tile i, and then takes one from the counter for each that it
    has had: `count` times over all blocks, with which the counter, bounded by `count`, has wrapped
    to zero.
    """

    num_heads: Int32
    count: Int32
    tile_counter: cute.Tensor

    @staticmethod
    def create(tiles: Tiles) -> Tiles:
        return tiles

    @cute.jit  # type: ignore[untyped-decorator]
    def hand_out(self, told: Told, describe: Any, table: Any, rows: int) -> None:
        """For one whole warp. The first tile is told before the kernel ahead has ended; the counter
        waits for that.
        """
        tile = cute.arch.block_idx()[0]
        told.tell(*self.look_up(tile, describe, table, rows))
        cute.arch.griddepcontrol_wait()
        while tile < self.count:
            told.until_wanted()
            tile = cute.arch.shuffle_sync(self.take(), 0)
            sequence, *found = self.look_up(
                cutlass.min(tile, self.count - 1), describe, table, rows
            )
            if tile >= self.count:
                sequence = Int32(-1)
            told.until_read()
            told.tell(sequence, *found)

    @cute.jit  # type: ignore[untyped-decorator]
    def look_up(self, tile: Any, describe: Any, table: Any, rows: int) -> Any:
        sequence, lane = tile // self.num_heads, cute.arch.lane_idx()
        # on their way with the length
        first_pages = table[sequence, cutlass.min(lane, cute.size(table, mode=[1]) - 1)]
        num_keys = describe(sequence).seqlen_k
        block = cutlass.max(num_keys - 1, 0) // rows
        page = cute.arch.shuffle_sync(first_pages, cutlass.min(block, WARP_SIZE - 1))
        if block >= WARP_SIZE:
            page = table[sequence, block]
        return sequence, tile % self.num_heads, num_keys, page

    @cute.jit  # type: ignore[untyped-decorator]
    def take(self) -> Any:
        """The next tile, or a number beyond all, for the first lane."""
        following = Int32(0)
        if cute.arch.lane_idx() == 0:
            last, counter = Int32(self.count - 1).ir_value(), self.tile_counter.iterator.llvm_ptr
            following = cute.arch.grid_dim()[0] + Int32(
                nvvm.atomicrmw(op=nvvm.AtomicOpKind.INC, ptr=counter, a=last)
            )
        return following
