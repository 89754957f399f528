"""Copies of queries, keys and values into shared memory, for the decode attention kernel.

No more of a page is read than is in use. Where there are few tiles, the first pages are asked for
before the kernel ahead has ended: all but the newest box, which that kernel may still be writing.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from cutlass.utils import LayoutEnum
from quack import copy_utils, layout_utils, sm90_utils

from spmd_rl.kernels.attention.flash_decode_tiles import COPY_BARRIER, TileMailbox
from spmd_rl.kernels.attention.flash_tile import BOX_ROWS


class DecodeLoads:
    """The producing warps of a block; a part of the class `Decoding`, which sets what they use."""

    blocks_on_an_sm: int
    has_one_page_of_values: bool  # all stages of values share it
    repeats: bool
    num_stages: int
    tile_m: int
    tile_n: int
    tile_hdim: int

    def in_boxes(self, cache: Any) -> Any:
        """Return how to copy a box, and the cache as [page_size, D, K, num_pages].

        A box is as wide as a row of swizzled memory: of 128, 64 or 32 bytes.
        """
        bits = cache.element_type.width
        box = BOX_ROWS, math.gcd(self.tile_hdim * bits, 8 * 128) // bits
        layout = sm90_utils.make_smem_layout(cache.element_type, LayoutEnum.ROW_MAJOR, box, None)
        cache = layout_utils.select(cache, [1, 3, 2, 0])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cache, layout, box, 1)

    def load(self, mQ: Any, mK: Any, mV: Any, sQ: Any, sK: Any, sV: Any, *rest: Any) -> None:
        atom_q, atom_k, atom_v, pipeline_k, pipeline_v, pipeline_q, *others = rest
        _, table, _, _, describe, tiles = others
        keys, values = (atom_k, mK, sK, pipeline_k), (atom_v, mV, sV, pipeline_v)
        queries = self.repeated(mQ, table)
        self.produce(atom_q, queries, sQ, pipeline_q, keys, values, table, describe, tiles())

    @cute.jit  # type: ignore[untyped-decorator]
    def produce(
        self, atom_q: Any, queries: Any, sQ: Any, pipeline_q: Any, keys: Any, values: Any,
        table: Any, describe: Any, tiles: Any,
    ) -> None:  # fmt: skip
        """Copy keys and values in one warp, queries in another, and hand out tiles in a third."""
        cute.arch.griddepcontrol_launch_dependents()
        warp, mailbox = (
            cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            TileMailbox(pipeline_q, COPY_BARRIER),
        )
        if warp == 0:
            self.load_pages(keys, values, table, mailbox)
        if warp == 1:
            self.load_queries(atom_q, queries, sQ, pipeline_q, mailbox)
        if warp == 2:
            tiles.hand_out(mailbox, describe, table, self.tile_n)

    def repeated(self, queries: Any, table: Any) -> Any:
        """View queries [G, D, K, B] once for each row of the page table, without a copy."""
        if not self.repeats:
            return queries
        shape, stride = queries.shape, queries.stride
        times = cute.size(table, mode=[0]) // shape[3]
        layout = cute.make_layout(
            (*shape[:3], (times, shape[3])), stride=(*stride[:3], (0, stride[3]))
        )
        return cute.make_tensor(queries.iterator, layout)

    @cute.jit  # type: ignore[untyped-decorator]
    def load_queries(
        self, atom: Any, queries: Any, shared: Any, pipeline: Any, mailbox: TileMailbox
    ) -> None:
        cute.arch.griddepcontrol_wait()
        phase = Int32(1)
        sequence, head, _, _ = mailbox.read()
        while sequence >= 0:
            mailbox.release()
            rows = cute.local_tile(
                queries[None, None, head, sequence], (self.tile_m, self.tile_hdim), (0, 0)
            )
            copy, _, _ = copy_utils.tma_get_copy_fn(
                atom, 0, cute.make_layout(1), rows, shared, single_stage=True
            )
            pipeline.producer_acquire_w_index_phase(0, phase)
            copy(tma_bar_ptr=pipeline.sync_object_full.get_barrier(0))
            phase ^= 1
            sequence, head, _, _ = mailbox.read()

    @cute.jit  # type: ignore[untyped-decorator]
    def load_pages(self, keys: Any, values: Any, table: Any, mailbox: TileMailbox) -> None:
        """Copy each tile's pages, the last page first.

        Where there are few tiles, the first page's older rows are asked for before the wait.
        """
        state = make_pipeline_state(PipelineUserType.Producer, self.num_stages)
        sequence, head, num_keys, page = mailbox.read()
        early = Int32(0)  # rows of the first page before this one have been asked for
        if const_expr(self.blocks_on_an_sm == 1):
            newest = cutlass.max(num_keys - 1, 0)
            early = newest // BOX_ROWS * BOX_ROWS
            for cache in (keys, values):
                barrier = cache[-1].producer_get_barrier(state)
                self.copy(
                    cache, head, newest // self.tile_n, page, num_keys, barrier, state.index,
                    early, True,
                )  # fmt: skip
        cute.arch.griddepcontrol_wait()
        while sequence >= 0:
            mailbox.release()
            last = cutlass.max(num_keys - 1, 0) // self.tile_n
            for i in cutlass.range(last + 1, unroll=1):
                block = last - i
                if i > 0:
                    page, early = table[sequence, block], Int32(0)
                self.load_page("K", keys, head, block, page, num_keys, state, early)
                self.load_page("V", values, head, block, page, num_keys, state, early)
                if block == 0:
                    mailbox.request_next()
                state.advance()
            sequence, head, num_keys, page = mailbox.read()
            early = Int32(0)

    @cute.jit  # type: ignore[untyped-decorator]
    def load_page(
        self, name: Any, cache: Any, head: Any, block: Any, page: Any, num_keys: Any, state: Any,
        early: Any,
    ) -> None:  # fmt: skip
        """Copy one page of keys ("K") or values ("V") when its stage is free."""
        pipeline = cache[-1]
        pipeline.producer_acquire(state)
        if const_expr(name == "V" and self.has_one_page_of_values):
            index, phase = state.index, state.phase
            # The one stage of values is free when the page before has been read.
            pipeline.sync_object_empty.wait(1 - index, phase ^ index)
        barrier = pipeline.producer_get_barrier(state)
        self.copy(cache, head, block, page, num_keys, barrier, state.index, early, False)

    @cute.jit  # type: ignore[untyped-decorator]
    def copy(
        self, cache: Any, head: Any, block: Any, page: Any, num_keys: Any, barrier: Any,
        stage: Any, early: Any, is_early: Any,
    ) -> None:  # fmt: skip
        """Copy the boxes of a page before row `early` of the sequence, or else the others."""
        atom, pages, shared, _ = cache
        # A page past the end of the cache is copied as zeros, without a read.
        beyond = cute.size(pages, mode=[3])
        pages = cute.local_tile(
            pages[None, None, head, None], (self.tile_n, self.tile_hdim), (0, 0, None)
        )
        _, to, source = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), pages, shared)
        high = self.tile_n // BOX_ROWS
        for row in cutlass.range_constexpr(high):
            first = block * self.tile_n + row * BOX_ROWS
            page_or_none = Int32(cutlass.select_(first < num_keys, page, beyond))
            was_early = Boolean(False)
            if const_expr(self.blocks_on_an_sm == 1):
                was_early = first < early
            if was_early == is_early:
                for box in cutlass.range_constexpr(row, cute.size(source, mode=[0, 1]), high):
                    ends = source[(None, box), page_or_none], to[(None, box), stage]
                    one_box = [
                        cute.group_modes(cute.append_ones(end, up_to_rank=2), 0, 2) for end in ends
                    ]
                    cute.copy(atom, *one_box, tma_bar_ptr=barrier)
