"""Copies of the kernel in `cute.py`: tiles of the weight and of x into a ring in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from spmd_rl.kernels.linear.tiles import PART, WGMMA_ROWS, Share

# Blocks of a cluster. A cluster lies within a group of 16 or 18 multiprocessors: clusters of four
# would leave some of them idle.
PAIR = 2
READ_ONCE = 0x12F0000000000000  # the L2 policy that CUTLASS calls EVICT_FIRST


class RingCopies:
    """Layouts of a share's ring, and the copying warp's loop."""

    def __init__(self, share: Share, halves: int) -> None:
        self.share, self.halves, self.parts = share, halves, share.k // PART
        self.cluster = min(share.blocks, PAIR)
        # With a low tile and many rows of x, one copy brings a whole stage; else each part has one.
        low = share.n == share.padded < WGMMA_ROWS and halves == 1
        self.box = self.parts if low and share.m * share.blocks >= WGMMA_ROWS else 1

    def tiles(self, rows: int, padded: int, halves: int = 1) -> Any:
        """Lay out a ring's tiles as [rows, PART, copies].

        Where one copy brings several tiles it is [rows, PART, tiles, copies].
        """
        box = (self.box,) if self.box > 1 else ()
        shape = (rows, PART, *box, self.share.stages * self.parts * halves // self.box)
        return cute.make_layout(
            shape, stride=(PART, 1, padded * PART, self.box * padded * PART)[: len(shape)]
        )

    def copying(
        self, op: Any, matrix: Any, swizzle: Any, rows: int, padded: int
    ) -> tuple[Any, Any]:
        """Return how to copy tiles of `rows` rows, and `matrix` [M, K] as copies see it."""
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

    def ends(self, atom: Any, matrix: Any, tiles: Any, block: Any) -> Any:
        """Return where copies of a block's tiles go to, and where they come from."""
        *box, _ = tiles.shape
        one = cute.local_tile(matrix, tuple(box), (block, *[0] * (len(box) - 2), None))
        groups = (cute.group_modes(each, 0, len(box)) for each in (tiles, one))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), *groups)

    @cute.jit  # type: ignore[untyped-decorator]
    def produce(
        self, w_atom: Any, w_ends: Any, x_atom: Any, x_ends: Any, full: Any, empty: Any,
        steps: Int32, early: Boolean,
    ) -> None:  # fmt: skip
        """Fill the ring step by step; called by the copying warp."""
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
        """Copy a step's tiles of the weight to all blocks of the cluster.

        The blocks take turns in copying. Each of them expects the weight's bytes and its own of x.
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
        self, atom: Any, ends: Any, step: Any, slot: Any, full: Any, to_all: Any = None,
        policy: int | None = None,
    ) -> None:  # fmt: skip
        """Copy the tiles of a step into a slot of the ring."""
        copies = self.parts // self.box
        policy = None if policy is None else cutlass.Int64(policy)
        for part in range(copies):
            for half, (to, source) in enumerate(ends):
                at = (slot * copies + part) * len(ends) + half
                one = source[None, step * copies + part], to[None, at]
                cute.copy(
                    atom, *one, tma_bar_ptr=full + slot, mcast_mask=to_all, cache_policy=policy
                )
