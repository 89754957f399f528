"""FlashAttention-4's forward kernel, rebuilt for decoding with the same sums in the same order.

- Blocks of threads take tiles, a head of a sequence each, one after the other
  (`flash_decode_tiles`). They ask for the keys of the next tile while they finish the current one.
- Where there are more tiles than SMs, two blocks share an SM. Each has one stage of values instead
  of two, and half of the registers.
- The kernel begins before the kernel ahead of it has ended (`flash_decode_loads`).
- It reads only the used rows of a page; the package reads whole pages.
- Queries that see several splits are not copied for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.utils import AuxData

from spmd_rl.kernels.attention.flash_decode_loads import DecodeLoads
from spmd_rl.kernels.attention.flash_decode_tiles import (
    COMPUTE_BARRIER,
    LoopConstant,
    TileMailbox,
    TileScheduler,
)
from spmd_rl.kernels.attention.flash_tile import ROWS, key_block
from spmd_rl.kernels.runtime.cute_cache import cached_on_disk

# by blocks on an SM: registers of each of 128 computing threads, and of 128 copying threads
REGISTERS = {1: (256, 56), 2: (208, 48)}


@cached_on_disk
def compiled_decoding(
    blocks: int, num_sms: int, dim: int, with_log_sum: bool, repeats: bool
) -> Callable[..., None]:
    """Compile the kernel for `blocks` blocks on an SM.

    It takes (q, keys, values, out, log_sum, num_keys, pages, tile_counter).
    """
    kernel = Decoding(**shape_of_kernel(dim), num_stages=2, intra_wg_overlap=blocks == 1)
    kernel.blocks_on_an_sm, kernel.max_blocks, kernel.repeats = blocks, blocks * num_sms, repeats
    kernel.has_one_page_of_values = blocks == 2
    return compiled(kernel, cutlass.BFloat16, with_log_sum)


def shape_of_kernel(dim: int) -> dict[str, Any]:
    """Return what the package's kernel is made with, which decides on its sums."""
    sizes = {"head_dim": dim, "head_dim_v": dim, "tile_m": ROWS}
    sizes["tile_n"] = key_block(dim)
    return {"dtype": cutlass.BFloat16, "num_threads": 256, "pack_gqa": False, **sizes}


def compiled(kernel: Decoding, of_cache: Any, with_log_sum: bool) -> Callable[..., None]:
    """Compile a kernel for keys and values of the dtype `of_cache`."""
    q, out = (tensor(cutlass.BFloat16, 4) for _ in range(2))
    keys, values = (tensor(of_cache, 4) for _ in range(2))
    log_sum = tensor(cutlass.Float32, 3) if with_log_sum else None
    num_keys, pages, tile_counter = tensor(Int32, 1), tensor(Int32, 2), tensor(Int32, 1)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = q, keys, values, out, log_sum, num_keys, pages, tile_counter, stream
    return cute.compile(kernel, *given, options="--enable-tvm-ffi")


def tensor(dtype: Any, rank: int) -> Any:
    """Describe a tensor of any size that is dense along its last dimension.

    Tensors of numbers of 16 bits and less begin at multiples of 16 bytes.
    """
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = *(cute.sym_int64() for _ in range(rank - 1)), 1
    return cute.runtime.make_fake_tensor(
        dtype, shape, stride, assumed_align=16 if dtype.width <= 16 else 4
    )


class Decoding(DecodeLoads, FlashAttentionForwardSm90):  # type: ignore[misc]
    """The package's kernel, with a scheduler and copies of ours.

    Its caller sets `blocks_on_an_sm`, `max_blocks` that fit the GPU at once, and `repeats`: whether
    a query sees several rows of pages.
    """

    max_blocks: int

    # The package sets these in its call, always for one block on an SM.
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
        """Let all stages of values share one page where two blocks are on an SM.

        Each block has room for two pages of keys then, but for one page of values.
        """
        self.values_layout = one_page(layout) if self.has_one_page_of_values else layout

    def memory(self, dtype: Any, layout: Any) -> Any:
        return cute.struct.Align[
            cute.struct.MemRange[dtype, cute.cosize(layout)], self.buffer_align_bytes
        ]

    def pages_in_memory(self) -> dict[str, Any]:
        """Return the parts of shared memory that follow the barriers."""
        layouts = {"sV": self.sV_layout, "sQ": self.sQ_layout, "sK": self.sK_layout}
        return {name: self.memory(self.dtype, layout) for name, layout in layouts.items()}

    def _get_shared_storage_cls(self) -> Any:
        stages = cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
        fields = {
            "mbar_ptr_Q": cute.struct.MemRange[cutlass.Int64, 2 + TileMailbox.NUM_BYTES // 8],
            "mbar_ptr_K": stages,
            "mbar_ptr_V": stages,
            **self.pages_in_memory(),
        }
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, q: Any, keys: Any, values: Any, out: Any, log_sum: Any, num_keys: Any, pages: Any,
        tile_counter: Any, stream: Any,
    ) -> None:  # fmt: skip
        self.caches = keys, values
        num_heads, num_rows = cute.size(keys, mode=[2]), cute.size(pages, mode=[0])
        self.tiles = TileScheduler(num_heads, num_heads * num_rows, tile_counter)
        # the package's own copies, which never run, are of its dtype
        keys, values = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.dtype), x.layout)
            for x in (keys, values)
        )
        scale, nothing = cutlass.Float32(self.tile_hdim**-0.5), (None, None, None, None)
        given = q, keys, values, out, log_sum, scale, *nothing[:3], num_keys, pages, *nothing
        FlashAttentionForwardSm90.__call__(self, *given, AuxData(None, None), stream)

    def kernel(self, mQ: Any, mK: Any, mV: Any, *rest: Any) -> Any:
        """Launch the package's kernel, copying keys and values in boxes of rows, not in pages."""
        (atom_k, mK), (atom_v, mV) = map(self.in_boxes, self.caches)
        given = *rest[:8], atom_k, atom_v, *rest[10:28], self.tiles, TileScheduler, *rest[30:]
        launcher = super().kernel(mQ, mK, mV, *given)
        launch = launcher.launch
        grid = cutlass.min(self.tiles.count, self.max_blocks), 1, 1
        launcher.launch = lambda **config: launch(
            **config | {"grid": grid, "min_blocks_per_mp": self.blocks_on_an_sm, "use_pdl": True}
        )
        return launcher

    def mma(self, *args: Any) -> None:
        """Run the package's compute loop over the tiles that are posted."""
        cute.arch.griddepcontrol_wait()
        self.queries, package_describe = args[12], args[19]
        mailbox = TileMailbox(self.queries, COMPUTE_BARRIER)

        def describe(sequence: Any) -> Any:
            described = package_describe(sequence, mSeqUsedK=mailbox.num_keys)
            mailbox.release()
            return described

        queries = QueriesUntilStored(self.queries)
        super().mma(
            *args[:12], queries, *args[13:19], describe, args[20], lambda: mailbox, *args[22:]
        )

    def epilogue(self, *args: Any) -> None:
        super().epilogue(*args)
        cute.arch.sync_warp()  # one lane has waited until the result is stored
        self.queries.consumer_release_w_index(0)


def one_page(layout: Any) -> Any:
    """Return a layout of stages of pages in which all of them are in one place."""
    rows, columns, stages = layout.outer.shape
    nowhere = 0 if isinstance(stages, int) else (0,) * len(stages)
    outer = cute.make_layout((rows, columns, stages), stride=(*layout.outer.stride[:2], nowhere))
    return cute.make_composed_layout(layout.inner, 0, outer)


class QueriesUntilStored(LoopConstant):
    """Pipeline of queries that ignores the package's release.

    The result is stored in the queries' memory: the package would let the next ones in too early.
    """

    def __init__(self, queries: Any) -> None:
        self.consumer_wait_w_index_phase = queries.consumer_wait_w_index_phase

    def consumer_release_w_index(self, index: int) -> None:
        pass
