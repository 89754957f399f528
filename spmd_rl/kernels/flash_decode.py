"""FlashAttention-4 for decoding: one new token a sequence over its pages.

The package builds its kernel so that one block of threads fills an SM, which reads nothing while a block starts and
while it ends; a block of decoding is short. Where there are more blocks than SMs, the same kernel is built here with
one stage of keys and values instead of two, and half of the registers, so that two blocks share an SM. What is summed,
and in which order, does not change, nor do bits. Another version of the package runs as it is built there.
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
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 48  # of a thread; twice 128 threads of each have an SM's 65,536


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
    if len(q) * kv_heads > _num_sms(q.device) and keys.shape[1] == TILE[1] and _verified():
        run = _two_on_an_sm(dim, heads // kv_heads, log_sum is not None)
        run((q, keys, values, out, log_sum, dim**-0.5, None, None, None, num_keys, pages, None, None, None, None))
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
def _two_on_an_sm(dim: int, groups: int, with_log_sum: bool) -> Callable[[tuple[Any, ...]], None]:
    """The kernel for such heads, compiled at its first call; it takes what FlashAttentionForwardSm90 takes."""
    import cutlass.cute as cute
    from cutlass import BFloat16
    from flash_attn.cute.cute_dsl_utils import to_cute_tensor
    from flash_attn.cute.utils import AuxData

    kernel = _kernel_class()(
        BFloat16,
        dim,
        dim,
        groups,
        pack_gqa=groups > 1,
        tile_m=TILE[0],
        tile_n=TILE[1],
        num_stages=1,
        num_threads=256,
        intra_wg_overlap=False,
    )
    compiled: Callable[..., None] | None = None

    def described(x: Any) -> Any:
        return to_cute_tensor(x, assumed_align=16 if x.dtype == torch.bfloat16 else 4) if isinstance(x, Tensor) else x

    def run(arguments: tuple[Any, ...]) -> None:
        nonlocal compiled
        nothing = AuxData(None, None)
        if compiled is None:
            stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
            compiled = cute.compile(kernel, *map(described, arguments), nothing, stream, options="--enable-tvm-ffi")
        compiled(*arguments, nothing)

    return run


@cache
def _kernel_class() -> Any:
    import cutlass.cute as cute
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

    class TwoOnAnSm(FlashAttentionForwardSm90):  # type: ignore[misc]
        """It may begin before the kernel ahead of it has ended, as the Triton kernels of the decode path do."""

        # The package sets these in its call for one block on an SM, whatever it is built with.
        num_mma_regs = property(lambda self: CONSUMER_REGISTERS, lambda self, value: None)
        num_producer_regs = property(lambda self: PRODUCER_REGISTERS, lambda self, value: None)

        def kernel(self, *args: Any, **kwargs: Any) -> Any:
            launcher = super().kernel(*args, **kwargs)
            launch = launcher.launch
            launcher.launch = lambda **config: launch(**(config | {"min_blocks_per_mp": 2, "use_pdl": True}))
            return launcher

        def load(self, *args: Any) -> None:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
            super().load(*args)

        def mma(self, *args: Any) -> None:
            cute.arch.griddepcontrol_wait()
            super().mma(*args)

    return TwoOnAnSm
