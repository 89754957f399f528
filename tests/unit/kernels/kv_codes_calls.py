"""Calls of the kernels for codes of keys and values, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes_triton import (
    decode_pages_on_gpu,
    encode_on_gpu,
    round_on_gpu,
)


def of_tokens(x: Tensor, exponent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, how many elements were clipped, and what the codes stand for."""
    clipped = torch.zeros((), dtype=torch.int64)
    return encode_on_gpu(x, exponent, clipped), clipped, round_on_gpu(x, exponent)


def of_pages(codes: Tensor, pages: Tensor, exponent: int) -> Tensor:
    return decode_pages_on_gpu(codes, pages, exponent, torch.bfloat16)
