"""Matrix products of few rows by large weights on NVIDIA Hopper: rings whose blocks share the
weight.

What `linear_gluon` does, early ask and all, but with a warp for the copies alone, and with shares
of any multiple of 4 or 8 rows of either side: so nearly all multiprocessors get an equal one, and
what goes through shared memory is least. Two blocks with the same rows of the weight form a
cluster: each asks for its turn of the tiles, and both get them all. The last share ends where the
weight does: it may overlap the one before, with the same bits.

Half of the ring is asked for before the wait: more of the weight would keep x waiting, which comes
the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from torch import Tensor

from spmd_rl.kernels.linear.cute_assembly import after_wait
from spmd_rl.kernels.linear.cute_epilogue import WARPS, Results
from spmd_rl.kernels.linear.tiles import PART, UNIT, WGMMA_ROWS, Share
from spmd_rl.kernels.runtime.cute_cache import kept

# blocks of a cluster, which lies within a group of 16 or 18 multiprocessors: fours leave some of
# them idle
PAIR = 2
READ_ONCE = 0x12F0000000000000  # L2's policy that CUTLASS calls EVICT_FIRST


def shared_matmul_into(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, share: Share, gated: bool = False
) -> None:
    """What `linear_triton.matmul_into` does, for bf16 matrices of 16-byte aligned rows, and K in
    whole parts.

    `out` may be fp32 where no product is `gated`, which is slower and for tests: rounding hides
    most of what differs.

    Raises: ValueError when the shares are too low or too high for the weight, or what is gated
    should not be rounded.
    """
    if gated and out.dtype != torch.bfloat16:
        raise ValueError(f"a gated product rounds to bfloat16, not to {out.dtype}")
    if not share.n <= out.shape[1] <= share.n * share.most_shares:
        raise ValueError(f"{share.most_shares} shares of {share.n} rows are no {out.shape[1]}")
    run = compiled_product(tuple(share), bias is not None, gated, out.dtype == torch.bfloat16)
    run(
        weight,
        x,
        out,
        bias if bias is None else bias.contiguous(),
        torch.cuda.is_current_stream_capturing(),
    )


@kept  # type: ignore[untyped-decorator]
def compiled_product(
    share: tuple[Any, ...], has_bias: bool, gated: bool, rounds: bool
) -> Callable[..., None]:
    """The kernel (weight, x, out, bias, early)."""
    m, n, k, width = (cute.sym_int() for _ in range(4))
    bias = cute.runtime.make_fake_tensor(BFloat16, (width,), stride=(1,)) if has_bias else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    matrices = (
        cute.runtime.make_fake_tensor(
            dtype, shape, stride=(cute.sym_int64(divisibility=UNIT), 1), assumed_align=16
        )
        for shape, dtype in (
            ((n, k), BFloat16),
            ((m, k), BFloat16),
            ((m, width), BFloat16 if rounds else Float32),
        )
    )
    product = Product(Share(*share), 2 if gated else 1)
    product.kernel.set_name_prefix(product.name())
    return cute.compile(
        product, *matrices, bias, Boolean(False), stream, options="--enable-tvm-ffi"
    )


class Product:
    def __init__(self, share: Share, halves: int) -> None:
        self.share, self.halves, self.parts = share, halves, share.k // PART
        self.cluster = min(share.blocks, PAIR)
        self.results = Results(share, halves)
        # A stage of a low tile for many rows of x comes in one copy, others in their parts.
        low = share.n == share.padded < WGMMA_ROWS and halves == 1
        self.box = self.parts if low and share.m * share.blocks >= WGMMA_ROWS else 1

    def name(self) -> str:
        """A prefix for the kernel's that tells a stage's tile and their number, for profiles."""
        m, n, k, stages, *_ = self.share
        return f"shared_matmul_{m}x{n}x{k}x{stages}" + "_x_first" * self.share.swap

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, weight: Any, x: Any, out: Any, bias: Any, early: Boolean, stream: Any
    ) -> None:
        share, count = self.share, self.share.stages * self.parts
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        x_layout = cute.tile_to_shape(atom, (share.m, PART, count), (0, 1, 2))
        # What lies behind a tile is read where wgmma takes more rows; their sums are not stored.
        tall = cute.tile_to_shape(atom, (self.results.tall, PART), (0, 1))
        stages = cute.make_layout(count, stride=self.halves * share.padded * PART)
        operand = cute.make_composed_layout(tall.inner, 0, cute.append(tall.outer, stages))
        w_tiles = cute.make_layout(
            (share.n, PART, count * self.halves), stride=(PART, 1, share.padded * PART)
        )
        w_layout = cute.make_composed_layout(tall.inner, 0, w_tiles)
        copy, copy_to_all = (
            cpasync.CopyBulkTensorTileG2SOp(),
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
        )
        w_copy = copy if const_expr(self.cluster == 1) else copy_to_all
        w_atom, w_tma = self.copying(w_copy, weight, tall.inner, share.n, share.padded)
        x_atom, x_tma = self.copying(copy, x, tall.inner, share.m, share.m)
        tile = WGMMA_ROWS, self.results.tile[1]
        mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), tile
        )
        tiles_m = cute.round_up(cute.ceil_div(x.shape[0], share.m), self.cluster)
        self.kernel(
            w_atom, w_tma, x_atom, x_tma, out, bias, early, mma, w_layout, x_layout, operand
        ).launch(
            grid=(tiles_m, cute.ceil_div(out.shape[1], share.n), 1),
            block=[32 * (WARPS + 1), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    def tiles(self, rows: int, padded: int, halves: int = 1) -> Any:
        """Layout of a ring's tiles [rows, PART, copies]; where a copy brings several, [rows, PART,
        tiles, copies].
        """
        box = (self.box,) if self.box > 1 else ()
        shape = (rows, PART, *box, self.share.stages * self.parts * halves // self.box)
        return cute.make_layout(
            shape, stride=(PART, 1, padded * PART, self.box * padded * PART)[: len(shape)]
        )

    def copying(
        self, op: Any, matrix: Any, swizzle: Any, rows: int, padded: int
    ) -> tuple[Any, Any]:
        """Copies from so many rows of `matrix` [M, K] to a ring, and the matrix as they see it: [M,
        K] or in parts.
        """
        tiles = self.tiles(rows, padded)
        one = cute.select(tiles, list(range(cute.rank(tiles) - 1)))
        if const_expr(self.box > 1):
            shape = matrix.shape[0], PART, matrix.shape[1] // PART
            matrix = cute.make_tensor(
                matrix.iterator, cute.make_layout(shape, stride=(matrix.stride[0], 1, PART))
            )
        return cpasync.make_tiled_tma_atom(
            op, matrix, cute.make_composed_layout(swizzle, 0, one), one.shape
        )

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(
        self, w_atom: Any, weight: Any, x_atom: Any, x: Any, out: Any, bias: Any, early: Boolean, mma: Any,
        w_layout: cute.ComposedLayout, x_layout: cute.ComposedLayout, operand: cute.ComposedLayout,
    ) -> None:  # fmt: skip
        share = self.share
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        first = block_m * share.m, cutlass.min(block_n * share.n, out.shape[1] - share.n)
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, share.stages)
        empty = smem.allocate_array(cutlass.Int64, share.stages)
        w_ring = smem.allocate_array(BFloat16, cute.cosize(w_layout.outer), byte_alignment=1024)
        x_ring = smem.allocate_array(BFloat16, cute.cosize(x_layout.outer), byte_alignment=1024)
        staged = self.results.room(smem, w_ring)
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(share.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, WARPS * self.cluster)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        w_pointer = cute.recast_ptr(w_ring, operand.inner, dtype=BFloat16)
        x_tiles = cute.make_tensor(
            cute.recast_ptr(x_ring, operand.inner, dtype=BFloat16), x_layout.outer
        )
        steps = cute.ceil_div(cute.size(x.shape[1:]), share.k)
        if warp_index == WARPS:
            rows = [half * out.shape[1] + first[1] for half in range(self.halves)]
            halves = [
                cute.domain_offset((row, *[0] * (cute.rank(weight) - 1)), weight) for row in rows
            ]
            w_tiles = cute.make_tensor(w_pointer, self.tiles(share.n, share.padded, self.halves))
            w_ends = [self.ends(w_atom, half, w_tiles, 0) for half in halves]
            x_ends = [
                self.ends(
                    x_atom,
                    x,
                    cute.make_tensor(x_tiles.iterator, self.tiles(share.m, share.m)),
                    block_m,
                )
            ]
            self.produce(w_atom, w_ends, x_atom, x_ends, full, empty, steps, early)
        else:
            w_operand = cute.make_tensor(
                w_pointer, w_layout.outer if const_expr(share.swap) else operand.outer
            )
            both = (x_tiles, w_operand) if const_expr(share.swap) else (w_operand, x_tiles)
            total = self.consume(mma, both, full, empty, steps)
            self.results.finish(mma, total, staged, out, bias, first, cute.size(x, mode=[0]))

    def ends(self, atom: Any, matrix: Any, tiles: Any, block: Any) -> Any:
        """Where copies of a block's tiles go to, and where they come from."""
        *box, _ = tiles.shape
        one = cute.local_tile(matrix, tuple(box), (block, *[0] * (len(box) - 2), None))
        groups = (cute.group_modes(each, 0, len(box)) for each in (tiles, one))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), *groups)

    @cute.jit  # type: ignore[untyped-decorator]
    def produce(
        self,
        w_atom: Any,
        w_ends: Any,
        x_atom: Any,
        x_ends: Any,
        full: Any,
        empty: Any,
        steps: Int32,
        early: Boolean,
    ) -> None:
        stages, asked = self.share.stages, self.share.early
        cute.arch.griddepcontrol_launch_dependents()
        if not early:
            cute.arch.griddepcontrol_wait()
        for step in cutlass.range_constexpr(asked):
            if step < steps:
                self.copy_weight(w_atom, w_ends, step, step, full)
        cute.arch.griddepcontrol_wait()
        for step in cutlass.range_constexpr(stages):
            if step < steps:
                if const_expr(step >= asked):
                    self.copy_weight(w_atom, w_ends, step, step, full)
                self.copy(x_atom, x_ends, step, step, full)
        slot, phase = Int32(0), Int32(0)
        for step in cutlass.range(stages, steps, unroll=1):
            cute.arch.mbarrier_wait(empty + slot, phase)
            self.copy_weight(w_atom, w_ends, step, slot, full)
            self.copy(x_atom, x_ends, step, slot, full)
            slot += 1
            if slot == stages:
                slot, phase = Int32(0), phase ^ 1

    @cute.jit  # type: ignore[untyped-decorator]
    def copy_weight(self, atom: Any, ends: Any, step: Int32, slot: Int32, full: Any) -> None:
        """A step's tiles to all blocks of the cluster, by the one whose turn it is. Each expects
        them and x's.
        """
        with cute.arch.elect_one():
            rows = self.halves * self.share.n + self.share.m
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 2 * self.share.k * rows)
        if const_expr(self.cluster == 1):
            self.copy(atom, ends, step, slot, full, policy=READ_ONCE)
        else:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            if step % self.cluster == rank:
                self.copy(
                    atom, ends, step, slot, full, cutlass.Int16((1 << self.cluster) - 1), READ_ONCE
                )

    def copy(
        self,
        atom: Any,
        ends: Any,
        step: Any,
        slot: Any,
        full: Any,
        to_all: Any = None,
        policy: int | None = None,
    ) -> None:
        copies = self.parts // self.box
        policy = None if policy is None else cutlass.Int64(policy)
        for part in range(copies):
            for half, (to, source) in enumerate(ends):
                at = (slot * copies + part) * len(ends) + half
                one = source[None, step * copies + part], to[None, at]
                cute.copy(
                    atom, *one, tma_bar_ptr=full + slot, mcast_mask=to_all, cache_policy=policy
                )

    @cute.jit  # type: ignore[untyped-decorator]
    def consume(self, mma: Any, both: Any, full: Any, empty: Any, steps: Int32) -> Any:
        """The chain over K: rows of the weight by rows of x, or of x by the weight's, float32."""
        share, lane = self.share, cute.arch.lane_idx()
        of_thread = mma.get_slice(cute.arch.thread_idx()[0])
        first = mma.make_fragment_A(of_thread.partition_A(both[0]))
        second = mma.make_fragment_B(of_thread.partition_B(both[1]))
        total = cute.make_rmem_tensor(of_thread.partition_shape_C(self.results.tile), Float32)
        total.fill(0.0)
        cute.arch.griddepcontrol_wait()
        slot, phase, before, ready = Int32(0), Int32(0), Int32(0), Boolean(False)
        for step in cutlass.range(steps, unroll=1):
            if not ready:
                cute.arch.mbarrier_wait(full + slot, phase)
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.fence()
            for part in cutlass.range_constexpr(self.parts):
                for k in cutlass.range_constexpr(PART // 16):
                    at = (None, None, k, slot * self.parts + part)
                    cute.gemm(atom, total, first[at], second[at], total)
            warpgroup.commit_group()
            read, before = before, slot
            slot += 1
            if slot == share.stages:
                slot, phase = Int32(0), phase ^ 1
            if step + 1 < steps:
                ready = cute.arch.mbarrier_try_wait(full + slot, phase)
            warpgroup.wait_group(1)
            if step > 0 and step - 1 + share.stages < steps and lane < self.cluster:
                cute.arch.mbarrier_arrive(
                    empty + read, lane if const_expr(self.cluster > 1) else None
                )
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(total)):
            total[i] = after_wait(total[i])
        return total
