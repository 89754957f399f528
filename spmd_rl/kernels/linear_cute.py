"""Matrix products of few rows by large weights on NVIDIA Hopper: rings whose blocks share the weight.

What `linear_gluon` does, early ask and all, but with a warp for the copies alone, and with shares of any multiple of 4
or 8 rows of either side: so all multiprocessors get an equal one, and what goes through shared memory is least. Two
blocks with the same rows of the weight form a cluster: each asks for its turn of the tiles, and both get them all.

Half of the ring is asked for before the wait: more of the weight would keep x waiting, which comes the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from torch import Tensor

from spmd_rl.kernels.cute_cache import kept
from spmd_rl.kernels.linear_tiles import LOW_UNIT, PART, UNIT, WGMMA_ROWS, Share

CONSUMERS = 4  # warps: one group for wgmma
PAIR = 2  # blocks of a cluster, which lies within a group of 16 or 18 multiprocessors: fours leave some of them idle
APART = 8  # elements between the rows of a result in shared memory, so that they begin in different banks
SILU_TIMES = """{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.f32 t, t; add.rn.f32 t, t, 0f3F800000;
div.full.f32 t, $1, t; mul.rn.f32 $0, t, $2; }"""  # what Triton makes of x / (1 + exp(-x)) * y


def shared_matmul_into(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, share: Share, gated: bool = False
) -> None:
    """What `linear_triton.matmul_into` does, for bf16 matrices of 16-byte aligned rows, and K in whole parts.

    Raises: ValueError when the shares are too low or too high for the weight.
    """
    if not share.n <= out.shape[1] <= share.n * share.num_shares:
        raise ValueError(f"{share.num_shares} shares of {share.n} rows are no {out.shape[1]}")
    run = compiled_product(tuple(share), bias is not None, gated)
    run(weight, x, out, bias if bias is None else bias.contiguous(), torch.cuda.is_current_stream_capturing())


@kept  # type: ignore[untyped-decorator]
def compiled_product(share: tuple[Any, ...], has_bias: bool, gated: bool) -> Callable[..., None]:
    """The kernel (weight, x, out, bias, early)."""
    m, n, k, width = (cute.sym_int() for _ in range(4))
    bias = cute.runtime.make_fake_tensor(BFloat16, (width,), stride=(1,)) if has_bias else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    matrices = (
        cute.runtime.make_fake_tensor(BFloat16, shape, stride=(cute.sym_int64(divisibility=UNIT), 1), assumed_align=16)
        for shape in ((n, k), (m, k), (m, width))
    )
    kernel = Product(Share(*share), 2 if gated else 1)
    return cute.compile(kernel, *matrices, bias, Boolean(False), stream, options="--enable-tvm-ffi")


class Product:
    def __init__(self, share: Share, halves: int) -> None:
        self.share, self.halves, self.parts = share, halves, share.k // PART
        self.cluster = min(share.blocks, PAIR)
        self.chunk = UNIT if share.n % UNIT == 0 else LOW_UNIT
        self.tall = -(-((halves - 1) * share.padded + share.n) // WGMMA_ROWS) * WGMMA_ROWS
        self.tile = (share.m, share.n) if share.swap else (self.tall, share.m)

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(self, weight: Any, x: Any, out: Any, bias: Any, early: Boolean, stream: Any) -> None:
        share, count = self.share, self.share.stages * self.parts
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        x_layout = cute.tile_to_shape(atom, (share.m, PART, count), (0, 1, 2))
        # What lies behind a tile is read where wgmma takes more rows; their sums are not stored.
        tall = cute.tile_to_shape(atom, (self.tall, PART), (0, 1))
        stages = cute.make_layout(count, stride=self.halves * share.padded * PART)
        operand = cute.make_composed_layout(tall.inner, 0, cute.append(tall.outer, stages))
        w_tiles = cute.make_layout((share.n, PART, count * self.halves), stride=(PART, 1, share.padded * PART))
        w_layout = cute.make_composed_layout(tall.inner, 0, w_tiles)
        copy, copy_to_all = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        w_copy = copy if const_expr(self.cluster == 1) else copy_to_all
        w_atom, w_tma = cpasync.make_tiled_tma_atom(w_copy, weight, cute.select(w_layout, [0, 1]), (share.n, PART))
        x_atom, x_tma = cpasync.make_tiled_tma_atom(copy, x, cute.select(x_layout, [0, 1]), (share.m, PART))
        mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (WGMMA_ROWS, self.tile[1])
        )
        tiles_m = cute.round_up(cute.ceil_div(x.shape[0], share.m), self.cluster)
        self.kernel(w_atom, w_tma, x_atom, x_tma, out, bias, early, mma, w_layout, x_layout, operand).launch(
            grid=(tiles_m, share.num_shares, 1),
            block=[32 * (CONSUMERS + 1), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(
        self, w_atom: Any, weight: Any, x_atom: Any, x: Any, out: Any, bias: Any, early: Boolean, mma: Any,
        w_layout: cute.ComposedLayout, x_layout: cute.ComposedLayout, operand: cute.ComposedLayout,
    ) -> None:  # fmt: skip
        share = self.share
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        _, blocks_n, _ = cute.arch.grid_dim()
        first = block_m * share.m, block_n * ((out.shape[1] - share.n) // self.chunk) // (blocks_n - 1) * self.chunk
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, share.stages)
        empty = smem.allocate_array(cutlass.Int64, share.stages)
        w_ring = smem.allocate_array(BFloat16, cute.cosize(w_layout.outer), byte_alignment=1024)
        x_ring = smem.allocate_array(BFloat16, cute.cosize(x_layout.outer), byte_alignment=1024)
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(share.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, CONSUMERS * self.cluster)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        w_pointer = cute.recast_ptr(w_ring, operand.inner, dtype=BFloat16)
        x_tiles = cute.make_tensor(cute.recast_ptr(x_ring, operand.inner, dtype=BFloat16), x_layout.outer)
        steps = cute.ceil_div(cute.size(x, mode=[1]), share.k)
        if warp_index == CONSUMERS:
            w_tiles = cute.make_tensor(w_pointer, w_layout.outer)
            halves = [cute.domain_offset((half * out.shape[1] + first[1], 0), weight) for half in range(self.halves)]
            w_ends = [self.ends(w_atom, half, w_tiles, share.n, 0) for half in halves]
            x_ends = [self.ends(x_atom, x, x_tiles, share.m, block_m)]
            self.produce(w_atom, w_ends, x_atom, x_ends, full, empty, steps, early)
        else:
            w_operand = cute.make_tensor(w_pointer, w_layout.outer if const_expr(share.swap) else operand.outer)
            both = (x_tiles, w_operand) if const_expr(share.swap) else (w_operand, x_tiles)
            total = self.consume(mma, both, full, empty, steps)
            apart = (share.n + APART, 1) if const_expr(share.swap) else (1, self.tall + APART)
            staged = cute.make_tensor(
                cute.recast_ptr(w_ring, dtype=BFloat16), cute.make_layout(self.tile, stride=apart)
            )
            self.finish(mma, total, staged, out, bias, first, cute.size(x, mode=[0]))

    def ends(self, atom: Any, matrix: Any, tiles: Any, rows: int, block: Any) -> Any:
        """Where copies of a block's tiles go to, and where they come from."""
        one = cute.local_tile(matrix, (rows, PART), (block, None))
        groups = cute.group_modes(tiles, 0, 2), cute.group_modes(one, 0, 2)
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), *groups)

    @cute.jit  # type: ignore[untyped-decorator]
    def produce(
        self, w_atom: Any, w_ends: Any, x_atom: Any, x_ends: Any, full: Any, empty: Any, steps: Int32, early: Boolean
    ) -> None:
        stages, asked = self.share.stages, self.share.stages // 2
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
        """A step's tiles to all blocks of the cluster, by the one whose turn it is. Each expects them and x's."""
        with cute.arch.elect_one():
            rows = self.halves * self.share.n + self.share.m
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 2 * self.share.k * rows)
        if const_expr(self.cluster == 1):
            self.copy(atom, ends, step, slot, full)
        else:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            if step % self.cluster == rank:
                self.copy(atom, ends, step, slot, full, cutlass.Int16((1 << self.cluster) - 1))

    def copy(self, atom: Any, ends: Any, step: Any, slot: Any, full: Any, to_all: Any = None) -> None:
        for part in range(self.parts):
            for half, (to, source) in enumerate(ends):
                at = (slot * self.parts + part) * len(ends) + half
                one = source[None, step * self.parts + part], to[None, at]
                cute.copy(atom, *one, tma_bar_ptr=full + slot, mcast_mask=to_all)

    @cute.jit  # type: ignore[untyped-decorator]
    def consume(self, mma: Any, both: Any, full: Any, empty: Any, steps: Int32) -> Any:
        """The chain over K: rows of the weight by rows of x, or of x by the weight's, float32."""
        share, lane = self.share, cute.arch.lane_idx()
        of_thread = mma.get_slice(cute.arch.thread_idx()[0])
        first = mma.make_fragment_A(of_thread.partition_A(both[0]))
        second = mma.make_fragment_B(of_thread.partition_B(both[1]))
        total = cute.make_rmem_tensor(of_thread.partition_shape_C(self.tile), Float32)
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
                cute.arch.mbarrier_arrive(empty + read, lane if const_expr(self.cluster > 1) else None)
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(total)):
            total[i] = after_wait(total[i])
        return total

    @cute.jit  # type: ignore[untyped-decorator]
    def finish(self, mma: Any, total: Any, staged: Any, out: Any, bias: Any, first: Any, m: Int32) -> None:
        """Round, turn over in shared memory, which no copy writes any more, and store."""
        share, thread, threads = self.share, cute.arch.thread_idx()[0], 32 * CONSUMERS
        if const_expr(bias is not None):
            where = mma.get_slice(thread).partition_C(cute.make_identity_tensor(self.tile))
            for i in cutlass.range_constexpr(cute.size(total)):
                row = where[i][1 if const_expr(share.swap) else 0]
                if row < share.n:
                    total[i] += bias[first[1] + row].to(Float32)
        rounded = cute.make_rmem_tensor_like(total, BFloat16)
        rounded.store(total.load().to(BFloat16))
        turn = cute.make_copy_atom(warp.StMatrix8x8x16bOp(not share.swap, 4 if self.tile[1] % 16 == 0 else 2), BFloat16)
        copy = cute.make_tiled_copy_C(turn, mma).get_slice(thread)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        cute.copy(turn, copy.retile(rounded), copy.partition_D(staged))
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if const_expr(not share.swap):
            staged = cute.make_tensor(staged.iterator, cute.select(staged.layout, [1, 0]))
        for i in cutlass.range(thread, share.m * share.n // self.chunk, threads, unroll=1):
            self.store(i, staged, out, first, m)

    @cute.jit  # type: ignore[untyped-decorator]
    def store(self, i: Int32, staged: Any, out: Any, first: Any, m: Int32) -> None:
        """The i-th chunk of a result, 8 or 16 bytes, or what those of the gate make with the other half's."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=16 * self.chunk)
        row, column = i // (self.share.n // self.chunk), i % (self.share.n // self.chunk)
        chunk, up = cute.make_rmem_tensor(self.chunk, BFloat16), cute.make_rmem_tensor(self.chunk, BFloat16)
        cute.copy(atom, cute.local_tile(staged, (1, self.chunk), (row, column))[0, None], chunk)
        if const_expr(self.halves == 2):
            below = row, column + self.share.padded // self.chunk
            cute.copy(atom, cute.local_tile(staged, (1, self.chunk), below)[0, None], up)
            for j in cutlass.range_constexpr(self.chunk):
                chunk[j] = silu_times(chunk[j].to(Float32), up[j].to(Float32)).to(BFloat16)
        row, column = first[0] + row, first[1] // self.chunk + column
        if row < m:
            cute.copy(atom, chunk, cute.local_tile(out, (1, self.chunk), (row, column))[0, None])


def after_wait(number: Any) -> Any:
    """The same, which the compiler does not read before the wait; where it does, it waits after each wgmma."""
    return _assembly("", "=f,0", number)


def silu_times(gate: Any, up: Any) -> Any:
    return _assembly(SILU_TIMES, "=f,f,f", gate, up)


@dsl_user_op  # type: ignore[untyped-decorator]
def _assembly(text: str, registers: str, *numbers: Any, loc: Any = None, ip: Any = None) -> Any:
    given = [number.ir_value(loc=loc, ip=ip) for number in numbers]
    options = {"has_side_effects": True, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Float32(llvm.inline_asm(T.f32(), given, text, registers, **options))
