"""Attention over ranges of keys whose softmaxes are merged, which the contract never does."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.attention.flash import flash_takes
from spmd_rl.kernels.attention.flash_ranges import flash_ranges


def merged_attention(q: Tensor, keys: Tensor, values: Tensor, ranges: int) -> Tensor:
    """Return attention of one query over even ranges of keys, merged by their log-sums.

    Shape: q [H, D]; keys and values [S, K, D]; returns [H, D].
    """
    parts = [
        _one_range(q, k.contiguous(), v.contiguous())
        for k, v in zip(keys.tensor_split(ranges), values.tensor_split(ranges), strict=True)
    ]
    return merge(*(list(column) for column in zip(*parts, strict=True)))


def merge(outs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """Return the outputs of several ranges of keys, weighted by their log-sums.

    Shape: outs [..., H, D] each; log_sums [..., H] fp32 each.
    """
    weights = torch.stack(log_sums).softmax(0).unsqueeze(-1)
    return (torch.stack([out.float() for out in outs]) * weights).sum(0).to(outs[0].dtype)


def _one_range(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [H, D] and the log-sum [H] fp32 over one range of keys."""
    if flash_takes(q.shape[-1], q.dtype, q.device):
        out, log_sum = flash_ranges(
            q[None], k[None], v[None], torch.full((1,), len(k), device=q.device)
        )
        return out[0], log_sum[0]
    groups = q.shape[0] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1).float() for x in (k, v))
    scores = (k @ q.float().unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1), scores.logsumexp(-1)
