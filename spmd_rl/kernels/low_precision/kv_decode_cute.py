"""The decode attention kernel over pages of codes, with the bits of attention to their numbers.

Codes are copied into shared memory as they are. The computing threads turn a page of them into the
numbers that they stand for, which go to where the tensor cores read keys or values. From there on
all is the kernel of `flash_decode_cute`, so sums and their order are the same. Values are turned
while the scores are computed, and the next keys while values are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum
from quack import layout_utils, sm90_utils

from spmd_rl.kernels.attention.flash_decode_cute import (
    Decoding,
    compiled,
    one_page,
    shape_of_kernel,
)
from spmd_rl.kernels.attention.flash_decode_tiles import READ_BARRIER, LoopConstant
from spmd_rl.kernels.low_precision.e4m3_cute import numbers_of_two
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.runtime.cute_cache import cached_on_disk

PAGE_BARRIER = READ_BARRIER + 2  # a named barrier, above those of `flash_decode_tiles`
ROW_THREADS = 128  # the computing threads: each turns one row of a page
ALIGN_BYTES = 1024
CODES_AT_ONCE = 16  # what one load brings
# by blocks on an SM: pages of codes in flight, of keys and as many of values, for heads of 128
STAGES = {1: 4, 2: 1}


@cached_on_disk
def compiled_coded_decoding(
    blocks: int,
    num_sms: int,
    dim: int,
    with_log_sum: bool,
    repeats: bool,
    exponents: KvExponents,
) -> Callable[..., None]:
    """Compile the kernel for codes with these scales; else as `compiled_decoding`."""
    stages = STAGES[blocks] * (128 // dim)
    kernel = CodedDecoding(**shape_of_kernel(dim), num_stages=stages, intra_wg_overlap=False)
    kernel.blocks_on_an_sm, kernel.max_blocks, kernel.repeats = blocks, blocks * num_sms, repeats
    kernel.exponents = dict(zip(("K", "V"), exponents, strict=True))
    return compiled(kernel, Uint8, with_log_sum)


class CodedDecoding(Decoding):
    """`Decoding` over codes; its caller sets the `exponents` of keys ("K") and values ("V") too."""

    exponents: dict[str, int]
    has_one_page_of_values = False  # each stage of codes has a page
    sK_layout = property(
        lambda self: self.keys_layout,
        lambda self, value: setattr(self, "keys_layout", one_page(value)),
    )

    def lay_out_values(self, layout: Any) -> None:
        self.values_layout = one_page(layout)

    def lay_out_codes(self) -> Any:
        page = self.tile_n, self.tile_hdim
        return sm90_utils.make_smem_layout(Uint8, LayoutEnum.ROW_MAJOR, page, self.num_stages)

    def pages_in_memory(self) -> dict[str, Any]:
        codes = self.memory(Uint8, self.lay_out_codes())
        return {"codes_K": codes, "codes_V": codes, **super().pages_in_memory()}

    def kernel(self, mQ: Any, mK: Any, mV: Any, *rest: Any) -> Any:
        self.tma_copy_bytes |= dict.fromkeys(("K", "V"), self.tile_n * self.tile_hdim)
        return super().kernel(mQ, mK, mV, *rest)

    def codes_in_memory(self, queries: Any) -> tuple[Any, Any]:
        """Return the codes of keys and values, which follow the barriers."""
        layout = self.lay_out_codes()
        start = cute.recast_ptr(queries.sync_object_full.get_barrier(0) + 1, dtype=Uint8)
        start = start.align(ALIGN_BYTES)
        return tuple(
            cute.make_tensor(cute.recast_ptr(place, layout.inner, dtype=Uint8), layout.outer)
            for place in (start, start + cute.cosize(layout))
        )

    def load(self, mQ: Any, mK: Any, mV: Any, sQ: Any, sK: Any, sV: Any, *rest: Any) -> None:
        super().load(mQ, mK, mV, sQ, *self.codes_in_memory(rest[5]), *rest)

    def mma(self, *args: Any) -> None:
        codes = self.codes_in_memory(args[12])
        numbers = args[5], layout_utils.transpose_view(args[6])
        self.pages = {
            name: (codes[i], numbers[i], args[10 + i]) for i, name in enumerate(("K", "V"))
        }
        self.row = args[15]
        super().mma(*args)

    def mma_one_n_block(
        self, state: Any, n_block: Any, mma_qk_fn: Any, mma_pv_fn: Any, pipeline_k: Any,
        pipeline_v: Any, is_first_n_block: bool = False, **rest: Any,
    ) -> Any:  # fmt: skip
        """Run the package's step for one page, with its keys and values turned on the way.

        Keys have been turned by the step before, but for those of the first page.
        """
        following = state.clone()
        following.advance()
        if const_expr(is_first_n_block):
            self.turn("K", state)

        def scores(**given: Any) -> Any:
            self.meet()  # all have turned the keys, and have read the values before
            found = mma_qk_fn(**given)
            self.turn("V", state)
            return found

        def add_values(wg_wait: int, **given: Any) -> None:
            mma_pv_fn(wg_wait=-1, **given)
            self.turn_next("K", following, n_block)
            warpgroup.wait_group(wg_wait)

        return super().mma_one_n_block(
            state,
            n_block,
            scores,
            add_values,
            TurnedPages(self.meet),  # all have turned the values, and have read the keys
            TurnedPages(lambda: None),
            is_first_n_block=is_first_n_block,
            **rest,
        )

    def meet(self) -> None:
        """Let the tensor cores see what all computing threads have written."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=PAGE_BARRIER, number_of_threads=ROW_THREADS)

    @cute.jit  # type: ignore[untyped-decorator]
    def turn_next(self, name: Any, state: Any, block: Any) -> None:
        """Turn the page below `block`, if there is one."""
        if block > 0:
            self.turn(name, state)

    def turn(self, name: str, state: Any) -> None:
        """Turn this thread's row of a page of codes into numbers, and let the next page come.

        It may come once numbers are stored: codes have arrived in registers then. Right after the
        loads it could overtake them, since a warp's arrival at a barrier does not wait for loads.
        """
        codes, numbers, pipeline = self.pages[name]
        pipeline.consumer_wait(state, pipeline.consumer_try_wait(state))
        parts = self.tile_hdim // CODES_AT_ONCE
        held = cute.make_rmem_tensor((CODES_AT_ONCE, parts), Uint8)
        source = self.parts_of_row(codes, state.index)
        for i in range(parts):
            cute.autovec_copy(source[None, i], held[None, i])
        target = self.parts_of_row(numbers, 0)
        for i in range(parts):
            words = cute.recast_tensor(held[None, i], Uint32)
            pairs = cute.make_rmem_tensor((CODES_AT_ONCE // 2,), Uint32)
            for j in range(CODES_AT_ONCE // 4):
                pairs[2 * j], pairs[2 * j + 1] = (
                    numbers_of_two(words[j], half, self.exponents[name]) for half in (0, 1)
                )
            cute.autovec_copy(cute.recast_tensor(pairs, self.dtype), target[None, i])
        cute.arch.sync_warp()
        pipeline.consumer_release(state)

    def parts_of_row(self, pages: Any, stage: Any) -> Any:
        """Return this thread's row of a page as [CODES_AT_ONCE, parts]."""
        row = pages[self.row, None, stage]
        return cute.zipped_divide(row, (CODES_AT_ONCE,))


class TurnedPages(LoopConstant):
    """Pipeline of pages as the package's step sees it: they are there when it asks for them.

    `release` is called once they have been read.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def consumer_try_wait(self, state: Any) -> None:
        pass

    def consumer_wait(self, state: Any, token: Any) -> None:
        pass

    def consumer_release(self, state: Any) -> None:
        self._release()
