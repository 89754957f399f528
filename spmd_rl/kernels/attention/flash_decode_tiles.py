"""Dynamic tile scheduler of the decode attention kernel: a tile is one head of one sequence.

Sequences differ in length, so a counter hands tiles out. In each block of threads, one warp takes
the next tile while the last page of the current one is being copied. It looks up what the other
warps must know of the tile, and posts it once they have read the current tile's entry. The copying
warps go on at once, the computing warps when they have finished the current tile.
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

# identifiers of named barriers, above those of the package
COPY_BARRIER, COMPUTE_BARRIER, READ_BARRIER, REQUEST_BARRIER = range(
    max(NamedBarrierFwd) + 1, max(NamedBarrierFwd) + 5
)
LISTENERS = {COPY_BARRIER: 2 * WARP_SIZE, COMPUTE_BARRIER: 4 * WARP_SIZE}  # threads that wait there


class LoopConstant:
    """An object that a loop of the kernel carries along unchanged."""

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self


class TileMailbox(LoopConstant):
    """The current tile's entry in shared memory, behind the barriers of the queries.

    An entry is the sequence, the head, the number of keys and the page of the last key. A sequence
    below 0 ends the loop. Each listener waits with `read` at the barrier of its kind, and calls
    `release` once for each tile, after which the entry may change.
    """

    NUM_BYTES = 16

    def __init__(self, queries: Any, barrier: int) -> None:
        behind = cute.recast_ptr(queries.sync_object_full.get_barrier(0) + 2, dtype=Int32)
        self.slot = cute.make_tensor(behind, cute.make_layout(self.NUM_BYTES // 4))
        # a tensor that gives this number for any sequence
        self.num_keys = cute.make_tensor(behind + 2, cute.make_layout(1, stride=0))
        self.barrier = barrier

    def read(self) -> tuple[Any, ...]:
        cute.arch.barrier(
            barrier_id=self.barrier, number_of_threads=LISTENERS[self.barrier] + WARP_SIZE
        )
        return tuple(self.slot[i] for i in range(self.NUM_BYTES // 4))

    def release(self) -> None:
        cute.arch.barrier_arrive(
            barrier_id=READ_BARRIER, number_of_threads=sum(LISTENERS.values()) + WARP_SIZE
        )

    def request_next(self) -> None:
        """Ask for the next tile: called by the whole warp that copies pages, once a tile."""
        cute.arch.barrier_arrive(barrier_id=REQUEST_BARRIER, number_of_threads=2 * WARP_SIZE)

    @cute.jit  # type: ignore[untyped-decorator]
    def post(self, *numbers: Any) -> None:
        """Post an entry. This and the waits below are called by the whole scheduling warp."""
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(numbers)):
                self.slot[i] = Int32(numbers[i])
        for barrier, threads in cutlass.const_expr(tuple(LISTENERS.items())):
            cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads + WARP_SIZE)

    def wait_until_read(self) -> None:
        cute.arch.barrier(
            barrier_id=READ_BARRIER, number_of_threads=sum(LISTENERS.values()) + WARP_SIZE
        )

    def wait_until_requested(self) -> None:
        cute.arch.barrier(barrier_id=REQUEST_BARRIER, number_of_threads=2 * WARP_SIZE)

    def get_current_work(self) -> Any:
        """Read the entry under the name that the package's compute loop calls."""
        sequence, head, _, _ = self.read()
        return WorkTileInfo((Int32(0), head, sequence, Int32(0)), sequence >= 0)

    initial_work_tile_info = get_current_work

    def advance_to_next_work(self) -> None:
        """Do nothing: the next call of `get_current_work` waits for the next tile."""


@dataclass
class TileScheduler(ParamsBase):  # type: ignore[misc]
    """The tiles of a launch, in which the heads of a sequence are neighbours.

    The block of index i begins with tile i, and takes one more from the counter after each tile.
    All blocks together take `count` times, so the counter, which wraps at `count`, ends at zero.
    """

    num_heads: Int32
    count: Int32
    tile_counter: cute.Tensor

    @staticmethod
    def create(tiles: TileScheduler) -> TileScheduler:
        return tiles

    @cute.jit  # type: ignore[untyped-decorator]
    def hand_out(self, mailbox: TileMailbox, describe: Any, table: Any, rows: int) -> None:
        """Hand out tiles until none is left; called by one whole warp.

        The first tile is posted before the kernel ahead has ended. The counter is read after it.
        """
        tile = cute.arch.block_idx()[0]
        mailbox.post(*self.look_up(tile, describe, table, rows))
        cute.arch.griddepcontrol_wait()
        while tile < self.count:
            mailbox.wait_until_requested()
            tile = cute.arch.shuffle_sync(self.next_tile(), 0)
            sequence, *entry = self.look_up(
                cutlass.min(tile, self.count - 1), describe, table, rows
            )
            if tile >= self.count:
                sequence = Int32(-1)
            mailbox.wait_until_read()
            mailbox.post(sequence, *entry)

    @cute.jit  # type: ignore[untyped-decorator]
    def look_up(self, tile: Any, describe: Any, table: Any, rows: int) -> Any:
        """Return a tile's entry: its sequence, head, number of keys, and page of the last key."""
        sequence, lane = tile // self.num_heads, cute.arch.lane_idx()
        # the first pages are loaded together with the length
        first_pages = table[sequence, cutlass.min(lane, cute.size(table, mode=[1]) - 1)]
        num_keys = describe(sequence).seqlen_k
        block = cutlass.max(num_keys - 1, 0) // rows
        page = cute.arch.shuffle_sync(first_pages, cutlass.min(block, WARP_SIZE - 1))
        if block >= WARP_SIZE:
            page = table[sequence, block]
        return sequence, tile % self.num_heads, num_keys, page

    @cute.jit  # type: ignore[untyped-decorator]
    def next_tile(self) -> Any:
        """Take the next tile in the first lane; a number beyond all tiles where none is left."""
        following = Int32(0)
        if cute.arch.lane_idx() == 0:
            last, counter = Int32(self.count - 1).ir_value(), self.tile_counter.iterator.llvm_ptr
            following = cute.arch.grid_dim()[0] + Int32(
                nvvm.atomicrmw(op=nvvm.AtomicOpKind.INC, ptr=counter, a=last)
            )
        return following
