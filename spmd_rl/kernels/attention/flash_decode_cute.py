"""FlashAttention-4's kernel for decoding, built otherwise.

Blocks of threads take tiles, a head of a sequence each, one after the other (`flash_decode_tiles`),
and ask for the keys of the next one while they finish the last. Where tiles are more than SMs, two
blocks share an SM, with one stage of values instead of two and half of the registers each. The
kernel begins before the one ahead of it has ended. Where tiles are few, it has by then asked for
the keys and values of the last page but the newest's box, which that kernel may still be writing.
No more of a page is read than is in use, where the package reads pages whole. Queries that see
several splits are not copied for each. What is summed, and in which order, does not change, nor do
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from cutlass.utils import LayoutEnum
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils, sm90_utils

from spmd_rl.kernels.attention.flash_decode_tiles import COMPUTING, COPYING, Fixed, Tiles, Told
from spmd_rl.kernels.attention.flash_tile import BOX_ROWS, TILE
from spmd_rl.kernels.runtime.cute_cache import kept

# blocks on an SM: of a consumer's thread, and a producer's; 128 of each
REGISTERS = {1: (256, 56), 2: (208, 48)}


@kept  # type: ignore[untyped-decorator]
def compiled_decoding(
    blocks: int, num_sms: int, dim: int, with_log_sum: bool, repeats: bool
) -> Callable[..., None]:
    """The kernel for so many blocks on an SM: (q, keys, values, out, log_sum, num_keys, pages,
    tile_counter).
    """
    kernel = Decoding(
        cutlass.BFloat16,
        dim,
        dim,
        tile_m=TILE[0],
        tile_n=TILE[1],
        num_stages=2,
        num_threads=256,
        pack_gqa=False,
        intra_wg_overlap=blocks == 1,
    )
    kernel.blocks_on_an_sm, kernel.max_blocks, kernel.repeats = blocks, blocks * num_sms, repeats
    q, keys, values, out = (tensor(cutlass.BFloat16, 4) for _ in range(4))
    log_sum = tensor(cutlass.Float32, 3) if with_log_sum else None
    num_keys, pages, tile_counter = tensor(Int32, 1), tensor(Int32, 2), tensor(Int32, 1)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = q, keys, values, out, log_sum, num_keys, pages, tile_counter, stream
    return cute.compile(kernel, *given, options="--enable-tvm-ffi")


def tensor(dtype: Any, rank: int) -> Any:
    """One of any size, dense along its last dimension; numbers of 16 bits lie at multiples of 16
    bytes.
    """
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = *(cute.sym_int64() for _ in range(rank - 1)), 1
    return cute.runtime.make_fake_tensor(
        dtype, shape, stride, assumed_align=16 if dtype.width == 16 else 4
    )


class Decoding(FlashAttentionForwardSm90):  # type: ignore[misc]
    """Whoever builds it sets `blocks_on_an_sm`, `max_blocks` that the GPU has room for at once, and
    `repeats` where queries see several rows of pages."""

    # The package sets these in its call for one block on an SM, whatever it is built with.
    num_mma_regs = property(
        lambda self: REGISTERS[self.blocks_on_an_sm][0], lambda self, value: None
    )
    num_producer_regs = property(
        lambda self: REGISTERS[self.blocks_on_an_sm][1], lambda self, value: None
    )
    sV_layout = property(
        lambda self: self.values_layout, lambda self, value: self.lay_out_values(value)
    )

    def lay_out_values(self, layout: Any) -> None:
        """Two blocks on an SM have room for two pages of keys each, but for one of values: its
        stages are one.
        """
        if self.blocks_on_an_sm == 2:
            rows, columns, stages = layout.outer.shape
            nowhere = 0 if isinstance(stages, int) else (0,) * len(stages)
            outer = cute.make_layout(
                (rows, columns, stages), stride=(*layout.outer.stride[:2], nowhere)
            )
            layout = cute.make_composed_layout(layout.inner, 0, outer)
        self.values_layout = layout

    def _get_shared_storage_cls(self) -> Any:
        def memory(layout: Any) -> Any:
            return cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(layout)], self.buffer_align_bytes
            ]

        stages = cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
        fields = {
            "mbar_ptr_Q": cute.struct.MemRange[cutlass.Int64, 2 + Told.NUM_BYTES // 8],
            "mbar_ptr_K": stages,
            "mbar_ptr_V": stages,
            "sV": memory(self.sV_layout),
            "sQ": memory(self.sQ_layout),
            "sK": memory(self.sK_layout),
        }
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, q: Any, keys: Any, values: Any, out: Any, log_sum: Any, num_keys: Any, pages: Any, tile_counter: Any,
        stream: Any,
    ) -> None:  # fmt: skip
        self.caches = keys, values
        num_heads, num_rows = cute.size(keys, mode=[2]), cute.size(pages, mode=[0])
        self.tiles = Tiles(num_heads, num_heads * num_rows, tile_counter)
        scale, nothing = cutlass.Float32(self.tile_hdim**-0.5), (None, None, None, None)
        given = q, keys, values, out, log_sum, scale, *nothing[:3], num_keys, pages, *nothing
        FlashAttentionForwardSm90.__call__(self, *given, AuxData(None, None), stream)

    def kernel(self, mQ: Any, mK: Any, mV: Any, *rest: Any) -> Any:
        """The package's, with keys and values copied in boxes of a few rows instead of pages."""
        (atom_k, mK), (atom_v, mV) = map(self.in_boxes, self.caches)
        given = *rest[:8], atom_k, atom_v, *rest[10:28], self.tiles, Tiles, *rest[30:]
        launcher = super().kernel(mQ, mK, mV, *given)
        launch = launcher.launch
        grid = cutlass.min(self.tiles.count, self.max_blocks), 1, 1
        launcher.launch = lambda **config: launch(
            **config | {"grid": grid, "min_blocks_per_mp": self.blocks_on_an_sm, "use_pdl": True}
        )
        return launcher

    def in_boxes(self, cache: Any) -> Any:
        """How to copy a box, as wide as a row of swizzled memory, and the cache [page_size, D, K,
        num_pages].
        """
        box = BOX_ROWS, 64 if self.tile_hdim % 64 == 0 else 32
        layout = sm90_utils.make_smem_layout(cache.element_type, LayoutEnum.ROW_MAJOR, box, None)
        cache = layout_utils.select(cache, [1, 3, 2, 0])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cache, layout, box, 1)

    def load(self, mQ: Any, mK: Any, mV: Any, sQ: Any, sK: Any, sV: Any, *rest: Any) -> None:
        (
            atom_q,
            atom_k,
            atom_v,
            pipeline_k,
            pipeline_v,
            pipeline_q,
            _,
            table,
            _,
            _,
            describe,
            tiles,
        ) = rest
        keys, values = (atom_k, mK, sK, pipeline_k), (atom_v, mV, sV, pipeline_v)
        self.produce(
            atom_q, self.repeated(mQ, table), sQ, pipeline_q, keys, values, table, describe, tiles()
        )

    @cute.jit  # type: ignore[untyped-decorator]
    def produce(
        self, atom_q: Any, queries: Any, sQ: Any, pipeline_q: Any, keys: Any, values: Any, table: Any, describe: Any,
        tiles: Any,
    ) -> None:  # fmt: skip
        """One of the producer's warps copies keys and values, one queries, and one says of which
        tiles.
        """
        cute.arch.griddepcontrol_launch_dependents()
        warp, told = cute.arch.make_warp_uniform(cute.arch.warp_idx()), Told(pipeline_q, COPYING)
        if warp == 0:
            self.load_pages(keys, values, table, told)
        if warp == 1:
            self.load_queries(atom_q, queries, sQ, pipeline_q, told)
        if warp == 2:
            tiles.hand_out(told, describe, table, self.tile_n)

    def repeated(self, queries: Any, table: Any) -> Any:
        """Queries [G, D, K, B], each as often as it has rows in the table of pages, without a copy."""
        if not self.repeats:
            return queries
        shape, stride = queries.shape, queries.stride
        times = cute.size(table, mode=[0]) // shape[3]
        layout = cute.make_layout(
            (*shape[:3], (times, shape[3])), stride=(*stride[:3], (0, stride[3]))
        )
        return cute.make_tensor(queries.iterator, layout)

    @cute.jit  # type: ignore[untyped-decorator]
    def load_queries(self, atom: Any, queries: Any, shared: Any, pipeline: Any, told: Told) -> None:
        cute.arch.griddepcontrol_wait()
        phase = Int32(1)
        sequence, head, _, _ = told.numbers()
        while sequence >= 0:
            told.let_go()
            rows = cute.local_tile(
                queries[None, None, head, sequence], (self.tile_m, self.tile_hdim), (0, 0)
            )
            copy, _, _ = copy_utils.tma_get_copy_fn(
                atom, 0, cute.make_layout(1), rows, shared, single_stage=True
            )
            pipeline.producer_acquire_w_index_phase(0, phase)
            copy(tma_bar_ptr=pipeline.sync_object_full.get_barrier(0))
            phase ^= 1
            sequence, head, _, _ = told.numbers()

    @cute.jit  # type: ignore[untyped-decorator]
    def load_pages(self, keys: Any, values: Any, table: Any, told: Told) -> None:
        """Each tile's pages, the last first. Where tiles are few, their first rows are asked for
        before the wait.
        """
        state = make_pipeline_state(PipelineUserType.Producer, self.num_stages)
        sequence, head, num_keys, page = told.numbers()
        early = Int32(0)  # of the first page's rows, those before this one were
        if const_expr(self.blocks_on_an_sm == 1):
            newest = cutlass.max(num_keys - 1, 0)
            early = newest // BOX_ROWS * BOX_ROWS
            for cache in (keys, values):
                barrier = cache[-1].producer_get_barrier(state)
                self.copy(
                    cache,
                    head,
                    newest // self.tile_n,
                    page,
                    num_keys,
                    barrier,
                    state.index,
                    early,
                    True,
                )
        cute.arch.griddepcontrol_wait()
        while sequence >= 0:
            told.let_go()
            last = cutlass.max(num_keys - 1, 0) // self.tile_n
            for i in cutlass.range(last + 1, unroll=1):
                block = last - i
                if i > 0:
                    page, early = table[sequence, block], Int32(0)
                self.load_page("K", keys, head, block, page, num_keys, state, early)
                self.load_page("V", values, head, block, page, num_keys, state, early)
                if block == 0:
                    told.want_next()
                state.advance()
            sequence, head, num_keys, page = told.numbers()
            early = Int32(0)

    @cute.jit  # type: ignore[untyped-decorator]
    def load_page(
        self,
        name: Any,
        cache: Any,
        head: Any,
        block: Any,
        page: Any,
        num_keys: Any,
        state: Any,
        early: Any,
    ) -> None:
        pipeline = cache[-1]
        pipeline.producer_acquire(state)
        if const_expr(name == "V" and self.blocks_on_an_sm == 2):
            index, phase = state.index, state.phase
            # until the page before it is read
            pipeline.sync_object_empty.wait(1 - index, phase ^ index)
        barrier = pipeline.producer_get_barrier(state)
        self.copy(cache, head, block, page, num_keys, barrier, state.index, early, False)

    @cute.jit  # type: ignore[untyped-decorator]
    def copy(
        self, cache: Any, head: Any, block: Any, page: Any, num_keys: Any, barrier: Any, stage: Any, early: Any,
        is_early: Any,
    ) -> None:  # fmt: skip
        """Those boxes of a page that begin before row `early` of the sequence, or the others."""
        atom, pages, shared, _ = cache
        # a page that is not there: copied as zeros, without a read
        beyond = cute.size(pages, mode=[3])
        pages = cute.local_tile(
            pages[None, None, head, None], (self.tile_n, self.tile_hdim), (0, 0, None)
        )
        _, to, given = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), pages, shared)
        high = self.tile_n // BOX_ROWS
        for row in cutlass.range_constexpr(high):
            first = block * self.tile_n + row * BOX_ROWS
            page_or_none = Int32(cutlass.select_(first < num_keys, page, beyond))
            was_asked = Boolean(False)
            if const_expr(self.blocks_on_an_sm == 1):
                was_asked = first < early
            if was_asked == is_early:
                for box in cutlass.range_constexpr(row, cute.size(given, mode=[0, 1]), high):
                    ends = given[(None, box), page_or_none], to[(None, box), stage]
                    one_box = [
                        cute.group_modes(cute.append_ones(end, up_to_rank=2), 0, 2) for end in ends
                    ]
                    cute.copy(atom, *one_box, tma_bar_ptr=barrier)

    def mma(self, *args: Any) -> None:
        """The package's, over the tiles that are told."""
        cute.arch.griddepcontrol_wait()
        self.queries, package_describe = args[12], args[19]
        told = Told(self.queries, COMPUTING)

        def describe(sequence: Any) -> Any:
            described = package_describe(sequence, mSeqUsedK=told.num_keys)
            told.let_go()
            return described

        super().mma(
            *args[:12],
            Kept(self.queries),
            *args[13:19],
            describe,
            args[20],
            lambda: told,
            *args[22:],
        )

    def epilogue(self, *args: Any) -> None:
        super().epilogue(*args)
        cute.arch.sync_warp()  # with the lane that has waited until the result is stored
        self.queries.consumer_release_w_index(0)


class Kept(Fixed):
    """Queries, in whose place the result is stored: the package would let the next ones in before
    that.
    """

    def __init__(self, queries: Any) -> None:
        self.consumer_wait_w_index_phase = queries.consumer_wait_w_index_phase

    def consumer_release_w_index(self, index: int) -> None:
        pass
