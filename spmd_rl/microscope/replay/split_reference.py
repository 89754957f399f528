"""Attention over ranges of keys whose softmaxes are merged afterwards: what the contract does not
do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.attention.backend import attention_backend


def merged_attention(q: Tensor, keys: Tensor, values: Tensor, ranges: int) -> Tensor:
    """One query [H, D] over keys and values [S, K, D] in even ranges, merged by their log-sums;
    returns [H, D].
    """
    backend = attention_backend(q.shape[-1], q.dtype, q.device)
    parts = [
        backend.one_query(q, k.contiguous(), v.contiguous())
        for k, v in zip(keys.tensor_split(ranges), values.tensor_split(ranges), strict=True)
    ]
    return merge(*(list(column) for column in zip(*parts, strict=True)))


def merge(outs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """What several ranges of keys gave, weighted by their sums. Shape: each [..., H, D] and [...,
    H] fp32.
    """
    weights = torch.stack(log_sums).softmax(0).unsqueeze(-1)
    return (torch.stack([out.float() for out in outs]) * weights).sum(0).to(outs[0].dtype)
