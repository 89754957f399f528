"""What a block of `linear_cute` does with its sums: round them, turn them over in shared memory,
store them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from spmd_rl.kernels.linear.cute_assembly import silu_times
from spmd_rl.kernels.linear.tiles import LOW_UNIT, UNIT, WGMMA_ROWS, Share

WARPS = 4  # of one group for wgmma, each with the sums of 16 rows of every 64 of its first operand
LANES = 32
# elements between the rows of a result in shared memory, so that they begin in different banks
APART = 8
ROOM = 225 << 10  # bytes of shared memory beside barriers and gaps


class Results:
    def __init__(self, share: Share, halves: int) -> None:
        self.share, self.halves = share, halves
        self.chunk = UNIT if share.n % UNIT == 0 else LOW_UNIT
        self.tall = -(-((halves - 1) * share.padded + share.n) // WGMMA_ROWS) * WGMMA_ROWS
        self.tile = (share.m, share.n) if share.swap else (self.tall, share.m)
        ring = 2 * share.k * share.stages * (share.m + halves * share.padded)
        # A warp that has whole rows of the weight, and room beside the ring, waits for no other.
        self.alone = (
            not share.swap and halves == 1 and ring + 2 * share.m * (self.tall + APART) <= ROOM
        )

    def room(self, smem: cutlass.utils.SmemAllocator, ring: Any) -> Any:
        """Shared memory for them, of their own or that of a ring which no copy writes any more."""
        apart = (self.share.n + APART, 1) if self.share.swap else (1, self.tall + APART)
        layout = cute.make_layout(self.tile, stride=apart)
        own = (
            smem.allocate_array(BFloat16, cute.cosize(layout), byte_alignment=128)
            if self.alone
            else ring
        )
        return cute.make_tensor(cute.recast_ptr(own, dtype=BFloat16), layout)

    @cute.jit  # type: ignore[untyped-decorator]
    def finish(
        self, mma: Any, total: Any, staged: Any, out: Any, bias: Any, first: Any, m: Int32
    ) -> None:
        """Called by all warps of the group. `first` is where the block's rows of x, and of the
        weight, begin.
        """
        share = self.share
        if const_expr(bias is not None):
            where = mma.get_slice(cute.arch.thread_idx()[0]).partition_C(
                cute.make_identity_tensor(self.tile)
            )
            for i in cutlass.range_constexpr(cute.size(total)):
                row = where[i][1 if const_expr(share.swap) else 0]
                if row < share.n:
                    total[i] += bias[first[1] + row].to(Float32)
        if const_expr(out.element_type is Float32):
            self.store_sums(mma, total, out, first, m)
        else:
            self.round(mma, total, staged, out, first, m)

    @cute.jit  # type: ignore[untyped-decorator]
    def store_sums(self, mma: Any, total: Any, out: Any, first: Any, m: Int32) -> None:
        where = mma.get_slice(cute.arch.thread_idx()[0]).partition_C(
            cute.make_identity_tensor(self.tile)
        )
        for i in cutlass.range_constexpr(cute.size(total)):
            row, column = where[i] if const_expr(self.share.swap) else (where[i][1], where[i][0])
            if column < self.share.n and first[0] + row < m:
                out[first[0] + row, first[1] + column] = total[i]

    @cute.jit  # type: ignore[untyped-decorator]
    def round(self, mma: Any, total: Any, staged: Any, out: Any, first: Any, m: Int32) -> None:
        """To BFloat16, turned over in shared memory, so that they go out in units of 16 bytes."""
        share, thread, threads = self.share, cute.arch.thread_idx()[0], LANES * WARPS
        rounded = cute.make_rmem_tensor_like(total, BFloat16)
        rounded.store(total.load().to(BFloat16))
        turn = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(not share.swap, 4 if self.tile[1] % 16 == 0 else 2), BFloat16
        )
        copy = cute.make_tiled_copy_C(turn, mma).get_slice(thread)
        if const_expr(not self.alone):
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        cute.copy(turn, copy.retile(rounded), copy.partition_D(staged))
        if const_expr(not share.swap):
            staged = cute.make_tensor(staged.iterator, cute.select(staged.layout, [1, 0]))
        if const_expr(self.alone):
            cute.arch.sync_warp()
            self.store_own(staged, out, first, m)
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            width = share.n // self.chunk
            for i in cutlass.range(thread, share.m * width, threads, unroll=1):
                self.store(i // width, i % width, staged, out, first, m)

    @cute.jit  # type: ignore[untyped-decorator]
    def store_own(self, staged: Any, out: Any, first: Any, m: Int32) -> None:
        """The chunks of a warp's own rows of the weight."""
        share, each = self.share, WGMMA_ROWS // WARPS // self.chunk
        width = self.tall // WGMMA_ROWS * each
        for turn in cutlass.range_constexpr(-(-share.m * width // LANES)):
            i = turn * LANES + cute.arch.lane_idx()
            row, group, column = i // width, i % width // each, i % each
            column += (group * WARPS + cute.arch.thread_idx()[0] // LANES) * each
            if row < share.m and column < share.n // self.chunk:
                self.store(row, column, staged, out, first, m)

    @cute.jit  # type: ignore[untyped-decorator]
    def store(self, row: Int32, column: Int32, staged: Any, out: Any, first: Any, m: Int32) -> None:
        """A chunk, 8 or 16 bytes, or what those of the gate make with the other half's."""
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=16 * self.chunk
        )
        chunk, up = (
            cute.make_rmem_tensor(self.chunk, BFloat16),
            cute.make_rmem_tensor(self.chunk, BFloat16),
        )
        cute.copy(atom, cute.local_tile(staged, (1, self.chunk), (row, column))[0, None], chunk)
        if const_expr(self.halves == 2):
            below = row, column + self.share.padded // self.chunk
            cute.copy(atom, cute.local_tile(staged, (1, self.chunk), below)[0, None], up)
            for j in cutlass.range_constexpr(self.chunk):
                chunk[j] = silu_times(chunk[j].to(Float32), up[j].to(Float32)).to(BFloat16)
        row, column = first[0] + row, first[1] // self.chunk + column
        if row < m:
            cute.copy(atom, chunk, cute.local_tile(out, (1, self.chunk), (row, column))[0, None])
