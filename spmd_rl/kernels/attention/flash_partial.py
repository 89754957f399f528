"""FlashAttention-4 over a range of keys, to be merged with others; for diagnosis only.

The numeric contract never merges ranges of this kind. The microscope does, to recognise it.
"""

from __future__ import annotations

from torch import Tensor


def flash_partial(q: Tensor, k: Tensor, v: Tensor, num_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from one query of each sequence to its first `num_keys` keys.

    Returns the outputs and the logs of the softmaxes' denominators, which a merge needs.
    Shape: q [B, H, D], k and v [B, S, K, D], num_keys [B]; returns [B, H, D] and [B, H] fp32.
    """
    from spmd_rl.kernels.runtime.cute_cache import flash_interface

    out, log_sum = flash_interface()._flash_attn_fwd(
        q[:, None], k, v, seqused_k=num_keys.int(), causal=False, num_splits=1, return_lse=True
    )[:2]
    return out[:, 0], log_sum.flatten(1)
