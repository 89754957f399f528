"""Epilogue of the kernel in `cute.py`: add the bias, round, transpose in shared memory, store."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from spmd_rl.kernels.linear.cute_assembly import silu_times
from spmd_rl.kernels.linear.tiles import LOW_UNIT, UNIT, WGMMA_ROWS, Share

WARPS = 4  # of a group for wgmma, each with the sums of 16 rows of every 64 of the first operand
LANES = 32
# Elements between the rows of a result in shared memory, so that rows begin in different banks.
ROW_GAP = 8
SHARED_BYTES = 225 << 10  # shared memory of a block, without barriers and gaps


class Epilogue:
    """What a block does with its sums, for one share."""

    def __init__(self, share: Share, halves: int) -> None:
        self.share, self.halves = share, halves
        self.chunk = UNIT if share.n % UNIT == 0 else LOW_UNIT
        self.tall = -(-((halves - 1) * share.padded + share.n) // WGMMA_ROWS) * WGMMA_ROWS
        self.tile = (share.m, share.n) if share.swap else (self.tall, share.m)
        ring = 2 * share.k * share.stages * (share.m + halves * share.padded)
        # A warp waits for no other if it has whole rows of the weight, and memory beside the ring.
        staged_bytes = 2 * share.m * (self.tall + ROW_GAP)
        fits = ring + staged_bytes <= SHARED_BYTES
        self.warps_are_independent = not share.swap and halves == 1 and fits

    def staging(self, smem: cutlass.utils.SmemAllocator, ring: Any) -> Any:
        """Return shared memory for the sums: their own, or the ring's, which is not needed now."""
        apart = (self.share.n + ROW_GAP, 1) if self.share.swap else (1, self.tall + ROW_GAP)
        layout = cute.make_layout(self.tile, stride=apart)
        memory = ring
        if self.warps_are_independent:
            memory = smem.allocate_array(BFloat16, cute.cosize(layout), byte_alignment=128)
        return cute.make_tensor(cute.recast_ptr(memory, dtype=BFloat16), layout)

    @cute.jit  # type: ignore[untyped-decorator]
    def finish(
        self, mma: Any, total: Any, staged: Any, out: Any, bias: Any, first: Any, m: Int32
    ) -> None:
        """Finish a block's sums; called by all warps of the group.

        `first` holds the block's first row of x and its first row of the weight.
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
            self.round_and_store(mma, total, staged, out, first, m)

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
    def round_and_store(
        self, mma: Any, total: Any, staged: Any, out: Any, first: Any, m: Int32
    ) -> None:
        """Round to bfloat16 and transpose in shared memory, to store units of 16 bytes."""
        share, thread, threads = self.share, cute.arch.thread_idx()[0], LANES * WARPS
        rounded = cute.make_rmem_tensor_like(total, BFloat16)
        rounded.store(total.load().to(BFloat16))
        turn = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(not share.swap, 4 if self.tile[1] % 16 == 0 else 2), BFloat16
        )
        copy = cute.make_tiled_copy_C(turn, mma).get_slice(thread)
        if const_expr(not self.warps_are_independent):
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        cute.copy(turn, copy.retile(rounded), copy.partition_D(staged))
        if const_expr(not share.swap):
            staged = cute.make_tensor(staged.iterator, cute.select(staged.layout, [1, 0]))
        if const_expr(self.warps_are_independent):
            cute.arch.sync_warp()
            self.store_own(staged, out, first, m)
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            width = share.n // self.chunk
            for i in cutlass.range(thread, share.m * width, threads, unroll=1):
                self.store(i // width, i % width, staged, out, first, m)

    @cute.jit  # type: ignore[untyped-decorator]
    def store_own(self, staged: Any, out: Any, first: Any, m: Int32) -> None:
        """Store the chunks of a warp's own rows of the weight."""
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
        """Store a chunk of 8 or 16 bytes; of a gated product, SiLU(gate) * up of two chunks."""
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=16 * self.chunk
        )
        chunk = cute.make_rmem_tensor(self.chunk, BFloat16)
        up = cute.make_rmem_tensor(self.chunk, BFloat16)
        cute.copy(atom, cute.local_tile(staged, (1, self.chunk), (row, column))[0, None], chunk)
        if const_expr(self.halves == 2):
            below = row, column + self.share.padded // self.chunk
            cute.copy(atom, cute.local_tile(staged, (1, self.chunk), below)[0, None], up)
            for j in cutlass.range_constexpr(self.chunk):
                chunk[j] = silu_times(chunk[j].to(Float32), up[j].to(Float32)).to(BFloat16)
        row, column = first[0] + row, first[1] // self.chunk + column
        if row < m:
            cute.copy(atom, chunk, cute.local_tile(out, (1, self.chunk), (row, column))[0, None])
