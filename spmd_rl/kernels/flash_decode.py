"""FlashAttention-4 for decoding: one new token a sequence over its pages.

The package's kernel, built otherwise. It may begin before the kernel ahead of it has ended. It reads no more of a
sequence's last page than is in use, where the package reads pages whole. And where there are more blocks of threads
than SMs, two share an SM, with one stage of keys and values instead of two and half of the registers each: alone, a
block reads nothing while it starts and while it ends, and a block of decoding is short. What is summed, and in which
order, does not change, nor do bits. Another version of the package runs as it is built there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

TILE = (64, 128)  # the fewest query rows that the tensor cores take, and the key blocks of training
VERIFIED_VERSION = "4.0.0b19"  # the kernel's class takes its arguments so
BOX_ROWS = 32  # keys or values of a page that are copied at a time
REGISTERS = {1: (256, 56), 2: (208, 48)}  # blocks on an SM: of a consumer's thread, and a producer's; 128 of each


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, num_keys: Tensor, out: Tensor, log_sum: Tensor | None = None
) -> None:
    """Each query over the first keys of its pages, into `out` and, if wanted, `log_sum`.

    Shape: q and out [B, H, D]; keys and values [num_pages, page_size, K, D]; pages [B, P] and num_keys [B] int32;
    log_sum [B, H] fp32.
    """
    q, out = q.unsqueeze(1), out.unsqueeze(1)
    log_sum = None if log_sum is None else log_sum.unsqueeze(2)
    heads, dim, kv_heads = *q.shape[2:], keys.shape[2]
    if keys.shape[1] == TILE[1] and _verified():
        blocks = 2 if len(q) * kv_heads > _num_sms(q.device) else 1
        run = _compiled(blocks, dim, heads // kv_heads, log_sum is not None)
        run(q, keys, values, out, log_sum, num_keys, pages)
        return
    from flash_attn.cute.interface import _flash_attn_fwd  # the public function does not take a tile

    _flash_attn_fwd(
        q,
        keys,
        values,
        seqused_k=num_keys,
        page_table=pages,
        causal=False,  # one query sees every key
        num_splits=1,
        tile_mn=TILE,
        out=out,
        lse=log_sum,
    )


@cache
def _verified() -> bool:
    return version("flash-attn-4") == VERIFIED_VERSION


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _compiled(blocks: int, dim: int, groups: int, with_log_sum: bool) -> Callable[..., None]:
    """The kernel for so many blocks on an SM and such heads, compiled at its first call: (q, keys, values, out,
    log_sum, num_keys, pages)."""
    import cutlass.cute as cute
    from cutlass import BFloat16
    from flash_attn.cute.cute_dsl_utils import to_cute_tensor

    kernel = _kernel_class()(
        BFloat16,
        dim,
        dim,
        groups,
        pack_gqa=groups > 1,
        tile_m=TILE[0],
        tile_n=TILE[1],
        num_stages=3 - blocks,
        num_threads=256,
        intra_wg_overlap=blocks == 1,
    )
    kernel.blocks_on_an_sm = blocks
    compiled: Callable[..., None] | None = None

    def described(x: Tensor | None) -> Any:
        return None if x is None else to_cute_tensor(x, assumed_align=16 if x.dtype == torch.bfloat16 else 4)

    def run(*arguments: Tensor | None) -> None:
        nonlocal compiled
        if compiled is None:
            stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
            compiled = cute.compile(kernel, *map(described, arguments), stream, options="--enable-tvm-ffi")
        compiled(*arguments)

    return run


@cache
def _kernel_class() -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import cpasync
    from cutlass.utils import LayoutEnum
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.utils import AuxData
    from quack import copy_utils, layout_utils, sm90_utils

    class Decoding(FlashAttentionForwardSm90):  # type: ignore[misc]
        # The package sets these in its call for one block on an SM, whatever it is built with.
        num_mma_regs = property(lambda self: REGISTERS[self.blocks_on_an_sm][0], lambda self, value: None)
        num_producer_regs = property(lambda self: REGISTERS[self.blocks_on_an_sm][1], lambda self, value: None)

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
            launcher.launch = lambda **config: launch(
                **(config | {"min_blocks_per_mp": self.blocks_on_an_sm, "use_pdl": True})
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
            cute.arch.griddepcontrol_wait()
            _, atom_k, atom_v, *_, describe, scheduler = rest
            _, head, sequence, _ = scheduler().initial_work_tile_info().tile_idx
            self.num_keys = describe(sequence).seqlen_k
            self.boxes = {}
            for name, atom, pages, shared in (("K", atom_k, mK, sK), ("V", atom_v, mV, sV)):
                pages = cute.local_tile(pages[None, None, head, None], (self.tile_n, self.tile_hdim), (0, 0, None))
                _, to, given = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), pages, shared)
                self.boxes[name] = atom, given, to
            self.beyond = cute.size(mK, mode=[3])  # a page that is not there: copied as zeros, without a read
            super().load(mQ, mK, mV, sQ, sK, sV, *rest)

        def load_KV(
            self, copy: Any, paged: Any, shared: Any, block: Any, *, pipeline_kv: Any, producer_state: Any,
            K_or_V: str, page_idx: Any,
        ) -> None:  # fmt: skip
            atom, given, to = self.boxes[K_or_V]
            barrier = pipeline_kv.producer_get_barrier(producer_state)
            for box in range(cute.size(given, mode=[0, 1])):
                first = block * self.tile_n + box * BOX_ROWS % self.tile_n  # of block -1 where there are no keys
                page = cutlass.Int32(cutlass.select_((first >= 0) & (first < self.num_keys), page_idx, self.beyond))
                ends = given[(None, box), page], to[(None, box), producer_state.index]
                one_box = [cute.group_modes(cute.append_ones(end, up_to_rank=2), 0, 2) for end in ends]
                cute.copy(atom, *one_box, tma_bar_ptr=barrier)
            pipeline_kv.producer_commit(producer_state)

        def mma(self, *args: Any) -> None:
            cute.arch.griddepcontrol_wait()
            super().mma(*args)

    return Decoding
