"""FlashAttention-4 for decoding: one new token of each sequence attends to its pages."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from spmd_rl.kernels.attention.flash_tile import LARGE_HEAD, ROWS, key_block
from spmd_rl.kernels.low_precision.kv_codes import KvExponents
from spmd_rl.kernels.runtime.versions import has_flash


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    num_keys: Tensor,
    tile_counter: Tensor,
    out: Tensor,
    log_sum: Tensor | None = None,
    exponents: KvExponents | None = None,
) -> None:
    """Attend from each query to the first keys of its pages, for S rows of pages each.

    The output goes to `out`, and the log of the softmax's denominator to `log_sum` if it is given:
    minus infinity where there are no keys. `pages`, `num_keys`, and all keys and values but each
    sequence's newest may be read early (`pdl`). With `exponents`, keys and values are codes of a
    byte, whose scales these are. Then `is_rebuilt` must hold.
    Shape: q [B, H, D]; keys and values [num_pages, page_size, K, D]; pages [B * S, P] and num_keys
    [B * S] int32; out [B * S, H, D]; log_sum [B * S, H] fp32. tile_counter [1] int32 is zero before
    and after. Calls that may run at the same time need a counter each.
    """
    (heads, dim), kv_heads = q.shape[1:], keys.shape[2]
    if is_rebuilt(keys.shape[1], heads // kv_heads, dim):
        num_sms = _num_sms(q.device)
        has_room = dim <= LARGE_HEAD and len(pages) * kv_heads > num_sms
        blocks = 2 if has_room else 1
        kind = blocks, num_sms, dim, log_sum is not None, len(pages) > len(q)
        if exponents is None:
            from spmd_rl.kernels.attention.flash_decode_cute import compiled_decoding

            run = compiled_decoding(*kind)
        else:
            from spmd_rl.kernels.low_precision.kv_decode_cute import compiled_coded_decoding

            run = compiled_coded_decoding(*kind, exponents)
        # The queries of one key-value head are the rows of a tile.
        q, out = (x.view(-1, kv_heads, heads // kv_heads, dim).transpose(1, 2) for x in (q, out))
        log_sum = None if log_sum is None else log_sum.view(-1, kv_heads, heads // kv_heads)
        run(q, keys, values, out, log_sum, num_keys, pages, tile_counter)
        return
    assert exponents is None, "pages of codes are read by our own kernel alone"
    # The public function does not take a tile size.
    from spmd_rl.kernels.runtime.cute_cache import flash_interface

    flash_interface()._flash_attn_fwd(
        q.unsqueeze(1).repeat_interleave(len(pages) // len(q), 0),
        keys,
        values,
        seqused_k=num_keys,
        page_table=pages,
        causal=False,  # one query sees every key
        num_splits=1,
        tile_mn=(ROWS, key_block(dim)),
        out=out.unsqueeze(1),
        lse=None if log_sum is None else log_sum.unsqueeze(2),
    )


def is_rebuilt(page_size: int, heads_per_kv: int, dim: int) -> bool:
    """Whether our own kernel is used: a page is a block of keys, and queries fit into one tile."""
    return page_size == key_block(dim) and heads_per_kv <= ROWS and has_flash()


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
