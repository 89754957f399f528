"""GEMMs of few rows by large weights on NVIDIA Hopper, in CuTe DSL, in equal shares of the weight.

Like the kernel in `gluon.py` it asks for the weight early and keeps a ring of stages on their way.
It differs in three ways:

- One warp does nothing but copy.
- A block's share may be any multiple of 4 or 8 rows of either operand. So nearly all
  multiprocessors get an equal share, and the least goes through shared memory.
- Two blocks with the same rows of the weight form a cluster. They take turns in asking for its
  tiles, and both get them all.

The last share ends where the weight does. It may overlap the share before, with the same bits. Half
of the ring is asked for before the wait: more of the weight would delay x, which is copied the same
way.
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

from spmd_rl.kernels.linear.cute_assembly import added, after_wait
from spmd_rl.kernels.linear.cute_copies import RingCopies
from spmd_rl.kernels.linear.cute_epilogue import WARPS, Epilogue
from spmd_rl.kernels.linear.tiles import PART, UNIT, WGMMA_ROWS, Share
from spmd_rl.kernels.runtime.cute_cache import cached_on_disk


def shared_matmul_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    share: Share,
    gated: bool = False,
    chains: int = 1,
) -> None:
    """Multiply as `triton_gemm.matmul_into` does.

    Operands are bf16 with 16-byte aligned rows, and K a multiple of `PART`, or of the steps of all
    `chains`. `out` may be fp32 where the product is not `gated`: that is slower and for tests, as
    rounding hides most differences.

    Raises: ValueError for shares that do not cover the weight, and for a gated product in fp32.
    """
    if gated and out.dtype != torch.bfloat16:
        raise ValueError(f"a gated product rounds to bfloat16, not to {out.dtype}")
    if not share.n <= out.shape[1] <= share.n * share.most_shares:
        raise ValueError(f"{share.most_shares} shares of {share.n} rows are no {out.shape[1]}")
    rounds = out.dtype == torch.bfloat16
    run = compiled_matmul(tuple(share), bias is not None, gated, rounds, chains)
    bias = None if bias is None else bias.contiguous()
    run(weight, x, out, bias, torch.cuda.is_current_stream_capturing())


@cached_on_disk
def compiled_matmul(
    share: tuple[Any, ...], has_bias: bool, gated: bool, rounds: bool, chains: int
) -> Callable[..., None]:
    """Compile the kernel, which takes (weight, x, out, bias, early)."""
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
    matmul = SharedMatmul(Share(*share), 2 if gated else 1, chains)
    matmul.kernel.set_name_prefix(matmul.name())
    return cute.compile(matmul, *matrices, bias, Boolean(False), stream, options="--enable-tvm-ffi")


class SharedMatmul:
    """The kernel for one share; `halves` is 2 for a gated product, whose weight has two halves."""

    def __init__(self, share: Share, halves: int, chains: int) -> None:
        self.share, self.halves, self.parts = share, halves, share.k // PART
        self.chains = chains
        self.copies = RingCopies(share, halves)
        self.cluster = self.copies.cluster
        self.epilogue = Epilogue(share, halves)

    def name(self) -> str:
        """Return a prefix of the kernel's name in profiles: its tile and the number of stages."""
        m, n, k, stages, *_ = self.share
        return f"shared_matmul_{m}x{n}x{k}x{stages}" + "_x_first" * self.share.swap

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, weight: Any, x: Any, out: Any, bias: Any, early: Boolean, stream: Any
    ) -> None:
        share, count = self.share, self.share.stages * self.parts
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        x_layout = cute.tile_to_shape(atom, (share.m, PART, count), (0, 1, 2))
        # Where wgmma takes more rows than a tile has, it reads what lies behind the tile. The sums
        # of those rows are not stored.
        tall = cute.tile_to_shape(atom, (self.epilogue.tall, PART), (0, 1))
        stages = cute.make_layout(count, stride=self.halves * share.padded * PART)
        operand = cute.make_composed_layout(tall.inner, 0, cute.append(tall.outer, stages))
        w_tiles = cute.make_layout(
            (share.n, PART, count * self.halves), stride=(PART, 1, share.padded * PART)
        )
        w_layout = cute.make_composed_layout(tall.inner, 0, w_tiles)
        copy = cpasync.CopyBulkTensorTileG2SOp()
        copy_to_all = cpasync.CopyBulkTensorTileG2SMulticastOp()
        w_copy = copy if const_expr(self.cluster == 1) else copy_to_all
        w_atom, w_tma = self.copies.copying(w_copy, weight, tall.inner, share.n, share.padded)
        x_atom, x_tma = self.copies.copying(copy, x, tall.inner, share.m, share.m)
        tile = WGMMA_ROWS, self.epilogue.tile[1]
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

    @cute.kernel  # type: ignore[untyped-decorator]
    def kernel(
        self, w_atom: Any, weight: Any, x_atom: Any, x: Any, out: Any, bias: Any, early: Boolean,
        mma: Any, w_layout: cute.ComposedLayout, x_layout: cute.ComposedLayout,
        operand: cute.ComposedLayout,
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
        staged = self.epilogue.staging(smem, w_ring)
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
            w_tiles = cute.make_tensor(
                w_pointer, self.copies.tiles(share.n, share.padded, self.halves)
            )
            w_ends = [self.copies.ends(w_atom, half, w_tiles, 0) for half in halves]
            x_stages = cute.make_tensor(x_tiles.iterator, self.copies.tiles(share.m, share.m))
            x_ends = [self.copies.ends(x_atom, x, x_stages, block_m)]
            self.copies.produce(w_atom, w_ends, x_atom, x_ends, full, empty, steps, early)
        else:
            w_operand = cute.make_tensor(
                w_pointer, w_layout.outer if const_expr(share.swap) else operand.outer
            )
            both = (x_tiles, w_operand) if const_expr(share.swap) else (w_operand, x_tiles)
            total = self.consume(mma, both, full, empty, steps)
            self.epilogue.finish(mma, total, staged, out, bias, first, cute.size(x, mode=[0]))

    @cute.jit  # type: ignore[untyped-decorator]
    def consume(self, mma: Any, both: Any, full: Any, empty: Any, steps: Int32) -> Any:
        """Sum over K in float32: rows of the weight by rows of x, or the reverse.

        With several chains, each begins at zero. A sum of 1, 2 or 4 of them is kept until its
        neighbour is complete.
        """
        share, lane = self.share, cute.arch.lane_idx()
        of_thread = mma.get_slice(cute.arch.thread_idx()[0])
        first = mma.make_fragment_A(of_thread.partition_A(both[0]))
        second = mma.make_fragment_B(of_thread.partition_B(both[1]))
        total = cute.make_rmem_tensor(of_thread.partition_shape_C(self.epilogue.tile), Float32)
        kept = [cute.make_rmem_tensor_like(total) for _ in range(self.chains.bit_length() - 1)]
        cute.arch.griddepcontrol_wait()
        slot, phase, before, ready = Int32(0), Int32(0), Int32(0), Boolean(False)
        length = steps // self.chains
        for chain in cutlass.range_constexpr(self.chains):
            total.fill(0.0)
            for step in cutlass.range(chain * length, (chain + 1) * length, unroll=1):
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
            self.add_neighbours(chain, total, kept)
        return total

    def add_neighbours(self, chain: int, total: Any, kept: list[Any]) -> None:
        """Add to a finished chain the kept sums that it completes, and keep the result."""
        completed = (chain ^ (chain + 1)).bit_length() - 1  # sums of 1, 2 and 4 chains
        for i in range(cute.size(total)):
            total[i] = after_wait(total[i])
            for one in kept[:completed]:
                total[i] = added(one[i], total[i])
            if completed < len(kept):
                kept[completed][i] = total[i]
