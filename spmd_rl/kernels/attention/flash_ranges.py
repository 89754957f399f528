"""FlashAttention-4 over ranges of keys that are merged afterwards: what the contract does not do,
to tell it apart.
"""

from __future__ import annotations

from torch import Tensor


def flash_ranges(q: Tensor, k: Tensor, v: Tensor, num_keys: Tensor) -> tuple[Tensor, Tensor]:
    """One query of each sequence over its first `num_keys` keys here, with the log-sums that
    merging ranges needs.

    Shape: q [B, H, D], k and v [B, S, K, D], num_keys [B]; returns [B, H, D] and [B, H] fp32.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out, log_sum = _flash_attn_fwd(
        q[:, None], k, v, seqused_k=num_keys.int(), causal=False, num_splits=1, return_lse=True
    )[:2]
    return out[:, 0], log_sum.flatten(1)
