"""Attention over ranges of keys whose softmaxes are merged, which the contract never does."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.attention.backend import attention_backend, latent_dim_of


def merged_attention(q: Tensor, keys: Tensor, values: Tensor, ranges: int) -> Tensor:
    """Return attention of one query over even ranges of keys, merged by their log-sums.

    Shape: q [H, D], keys [S, K, D] and values [S, K, V]; returns [H, V].
    """
    latent_dim = latent_dim_of(keys, values)
    backend = attention_backend(q.shape[-1], q.dtype, q.device, latent_dim=latent_dim)
    parts = [
        backend.one_query(q, k.contiguous(), v.contiguous())
        for k, v in zip(keys.tensor_split(ranges), values.tensor_split(ranges), strict=True)
    ]
    return merge(*(list(column) for column in zip(*parts, strict=True)))


def merge(outs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """Return the outputs of several ranges of keys, weighted by their log-sums.

    Shape: outs [..., H, D] each; log_sums [..., H] fp32 each.
    """
    weights = torch.stack(log_sums).softmax(0).unsqueeze(-1)
    return (torch.stack([out.float() for out in outs]) * weights).sum(0).to(outs[0].dtype)
