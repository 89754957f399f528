"""FlashAttention-4's kernel for decoding, built otherwise.

It begins before the kernel ahead of it has ended. Where blocks of threads are few or long, they have by then asked for
the keys and values of the last page but the newest's box, which that kernel may still be writing. No more of a page is
read than is in use, where the package reads pages whole. And where there are more blocks than SMs, two share an SM,
with one stage of keys and values instead of two and half of the registers each: alone, a block reads nothing while it
starts and while it ends, and a block of decoding is short. Queries that see several splits are not copied for each.
What is summed, and in which order, does not change, nor do bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from cutlass.utils import LayoutEnum
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils, sm90_utils

from spmd_rl.kernels.cute_cache import kept
from spmd_rl.kernels.flash_decode import BOX_ROWS, TILE

REGISTERS = {1: (256, 56), 2: (208, 48)}  # blocks on an SM: of a consumer's thread, and a producer's; 128 of each


@kept  # type: ignore[untyped-decorator]
def compiled_decoding(blocks: int, dim: int, groups: int, with_log_sum: bool, repeats: bool) -> Callable[..., None]:
    """The kernel for so many blocks on an SM and such heads: (q, keys, values, out, log_sum, num_keys, pages)."""
    kernel = Decoding(
        cutlass.BFloat16,
        dim,
        dim,
        groups,
        pack_gqa=groups > 1,
        tile_m=TILE[0],
        tile_n=TILE[1],
        num_stages=2,
        num_threads=256,
        intra_wg_overlap=blocks == 1,
    )
    kernel.blocks_on_an_sm, kernel.repeats = blocks, repeats
    q, keys, values, out = (tensor(cutlass.BFloat16, 4) for _ in range(4))
    log_sum = tensor(cutlass.Float32, 3) if with_log_sum else None
    num_keys, pages = tensor(cutlass.Int32, 1), tensor(cutlass.Int32, 2)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, q, keys, values, out, log_sum, num_keys, pages, stream, options="--enable-tvm-ffi")


def tensor(dtype: Any, rank: int) -> Any:
    """One of any size, dense along its last dimension; numbers of 16 bits lie at multiples of 16 bytes."""
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = *(cute.sym_int64() for _ in range(rank - 1)), 1
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16 if dtype.width == 16 else 4)


class Decoding(FlashAttentionForwardSm90):  # type: ignore[misc]
    """Whoever builds it sets `blocks_on_an_sm`, and `repeats` where queries see several rows of pages."""

    # The package sets these in its call for one block on an SM, whatever it is built with.
    num_mma_regs = property(lambda self: REGISTERS[self.blocks_on_an_sm][0], lambda self, value: None)
    num_producer_regs = property(lambda self: REGISTERS[self.blocks_on_an_sm][1], lambda self, value: None)
    asks_early = property(lambda self: self.blocks_on_an_sm == 1 or self.repeats)
    sV_layout = property(lambda self: self.values_layout, lambda self, value: self.lay_out_values(value))

    def lay_out_values(self, layout: Any) -> None:
        """Two blocks on an SM have room for two pages of keys each, but for one of values: its stages are one."""
        if self.blocks_on_an_sm == 2:
            rows, columns, stages = layout.outer.shape
            nowhere = 0 if isinstance(stages, int) else (0,) * len(stages)
            outer = cute.make_layout((rows, columns, stages), stride=(*layout.outer.stride[:2], nowhere))
            layout = cute.make_composed_layout(layout.inner, 0, outer)
        self.values_layout = layout

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, q: Any, keys: Any, values: Any, out: Any, log_sum: Any, num_keys: Any, pages: Any, stream: Any
    ) -> None:
        self.caches = keys, values
        scale, nothing = cutlass.Float32(self.tile_hdim**-0.5), (None, None, None, None)
        given = q, keys, values, out, log_sum, scale, *nothing[:3], num_keys, pages, *nothing
        FlashAttentionForwardSm90.__call__(self, *given, AuxData(None, None), stream)

    def kernel(self, mQ: Any, mK: Any, mV: Any, *rest: Any) -> Any:
        """The package's, with keys and values copied in boxes of a few rows instead of pages."""
        (atom_k, mK), (atom_v, mV) = map(self.in_boxes, self.caches)
        launcher = super().kernel(mQ, mK, mV, *rest[:8], atom_k, atom_v, *rest[10:])
        launch = launcher.launch
        pages = rest[6]
        launcher.launch = lambda **config: launch(
            **config
            | {
                "grid": (*config["grid"][:2], cute.size(pages, mode=[0])),
                "min_blocks_per_mp": self.blocks_on_an_sm,
                "use_pdl": True,
            }
        )
        return launcher

    def in_boxes(self, cache: Any) -> Any:
        """How to copy a box, as wide as a row of swizzled memory, and the cache [page_size, D, K, num_pages]."""
        box = BOX_ROWS, 64 if self.tile_hdim % 64 == 0 else 32
        layout = sm90_utils.make_smem_layout(cache.element_type, LayoutEnum.ROW_MAJOR, box, None)
        cache = layout_utils.select(cache, [1, 3, 2, 0])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cache, layout, box, 1)

    def load(self, mQ: Any, mK: Any, mV: Any, sQ: Any, sK: Any, sV: Any, *rest: Any) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        _, atom_k, atom_v, pipeline_k, pipeline_v, _, _, table, _, _, describe, scheduler = rest
        _, head, sequence, _ = scheduler().initial_work_tile_info().tile_idx
        self.num_keys = describe(sequence).seqlen_k
        self.beyond = cute.size(mK, mode=[3])  # a page that is not there: copied as zeros, without a read
        self.boxes = {}
        for name, atom, pages, shared in (("K", atom_k, mK, sK), ("V", atom_v, mV, sV)):
            pages = cute.local_tile(pages[None, None, head, None], (self.tile_n, self.tile_hdim), (0, 0, None))
            _, to, given = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), pages, shared)
            self.boxes[name] = atom, given, to
        if self.asks_early:
            newest = cutlass.max(self.num_keys - 1, 0)
            self.last_block, self.num_ready = newest // self.tile_n, newest // BOX_ROWS * BOX_ROWS
            self.ask_early(table[sequence, self.last_block], (("K", pipeline_k), ("V", pipeline_v)))
        cute.arch.griddepcontrol_wait()
        super().load(self.repeated(mQ, table) if self.repeats else mQ, mK, mV, sQ, sK, sV, *rest)

    def repeated(self, queries: Any, table: Any) -> Any:
        """Queries [G * 1, D, K, B], each as often as it has rows in the table of pages, without a copy."""
        shape, stride = queries.shape, queries.stride
        times = cute.size(table, mode=[0]) // shape[3]
        layout = cute.make_layout((*shape[:3], (times, shape[3])), stride=(*stride[:3], (0, stride[3])))
        return cute.make_tensor(queries.iterator, layout)

    @cute.jit  # type: ignore[untyped-decorator]
    def ask_early(self, page: Any, pipelines: Any) -> None:
        """The last page's boxes but the newest key's, before the stage expects them."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            state = make_pipeline_state(PipelineUserType.Producer, self.num_stages)
            for name, keys_or_values in cutlass.const_expr(pipelines):
                self.copy(name, self.last_block, page, keys_or_values.producer_get_barrier(state), 0, early=True)

    def load_KV(
        self, copy: Any, paged: Any, shared: Any, block: Any, *, pipeline_kv: Any, producer_state: Any,
        K_or_V: str, page_idx: Any,
    ) -> None:  # fmt: skip
        barrier = pipeline_kv.producer_get_barrier(producer_state)
        if K_or_V == "V" and self.blocks_on_an_sm == 2:
            index, phase = producer_state.index, producer_state.phase
            pipeline_kv.sync_object_empty.wait(1 - index, phase ^ index)  # until the page before it is read
        self.copy(K_or_V, block, page_idx, barrier, producer_state.index, early=False)
        pipeline_kv.producer_commit(producer_state)

    @cute.jit  # type: ignore[untyped-decorator]
    def copy(self, name: Any, block: Any, page: Any, barrier: Any, stage: Any, early: Any) -> None:
        """Those boxes of a page that are asked for early, or the others."""
        atom, given, to = self.boxes[name]
        high = self.tile_n // BOX_ROWS
        for row in cutlass.range_constexpr(high):
            first = block * self.tile_n + row * BOX_ROWS  # of block -1 where there are no keys
            page_or_none = cutlass.Int32(cutlass.select_((first >= 0) & (first < self.num_keys), page, self.beyond))
            is_early = cutlass.Boolean(False)
            if cutlass.const_expr(self.asks_early):
                is_early = (block == self.last_block) & (first < self.num_ready)
            if is_early == early:
                for box in cutlass.range_constexpr(row, cute.size(given, mode=[0, 1]), high):
                    ends = given[(None, box), page_or_none], to[(None, box), stage]
                    one_box = [cute.group_modes(cute.append_ones(end, up_to_rank=2), 0, 2) for end in ends]
                    cute.copy(atom, *one_box, tma_bar_ptr=barrier)

    def mma(self, *args: Any) -> None:
        cute.arch.griddepcontrol_wait()
        super().mma(*args)
