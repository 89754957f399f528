"""Keys and values in 8 bits: e4m3 codes with a fixed scale, a power of two, and back.

A code depends on its own element alone, so it is the same however tokens are batched. Code times
scale is exactly a number of bfloat16. What is beyond the largest code becomes that code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.runtime.differentiable import call

LARGEST = 448.0  # of all codes
KvExponents = tuple[int, int]  # of two: the scales of keys, and of values
_LEAST_CAPABILITY = (8, 9)  # of GPUs that round to e4m3


class KvCoding(NamedTuple):
    """How a cache makes codes of new keys and values, and its count of them.

    Shape: counts [2] int64: the elements that were stored, and those beyond the largest code.
    """

    exponents: KvExponents
    counts: Tensor


def encode_kv(x: Tensor, exponent: int, clipped: Tensor | None = None) -> Tensor:
    """Return the codes of keys or values, rounded to nearest even.

    The number of elements beyond the largest code is added to `clipped`.
    Shape: x [T, K, D], clipped [] int64; returns [T, K, D] uint8.
    """
    if _has_kernels(x):
        from spmd_rl.kernels.low_precision.kv_codes_triton import encode_on_gpu

        return encode_on_gpu(x, exponent, clipped)
    scaled = x.float() * 2.0**-exponent
    if clipped is not None:
        clipped += (scaled.abs() > LARGEST).sum()
    return scaled.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def of_both(
    convert: Callable[[Tensor, int], Tensor], k: Tensor, v: Tensor, exponents: KvExponents
) -> tuple[Tensor, Tensor]:
    """Convert keys and values with their scales.

    Values of fewer elements than keys are the last of these, and have the scale of keys.
    """
    keys, size = convert(k, exponents[0]), v.shape[-1]
    return keys, keys[..., -size:] if size < k.shape[-1] else convert(v, exponents[1])


def decode_pages(codes: Tensor, pages: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return what the codes of some pages stand for.

    Shape: codes [N, P, ...] uint8, pages [U] int64; returns [N, U, ...] of `dtype`.
    """
    if _has_kernels(codes):
        from spmd_rl.kernels.low_precision.kv_codes_triton import decode_pages_on_gpu

        return decode_pages_on_gpu(codes, pages, exponent, dtype)
    return _decode(codes.index_select(1, pages), exponent, dtype)


def round_kv(x: Tensor, exponent: int) -> Tensor:
    """Return what the codes of keys or values stand for.

    A gradient passes as if nothing had been rounded (a straight-through estimator).
    Shape: x [T, K, D]; returns the same.
    """
    out: Tensor = call(_Rounding, x, exponent)
    return out


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exponent: int) -> Tensor:
        if _has_kernels(x):
            from spmd_rl.kernels.low_precision.kv_codes_triton import round_on_gpu

            return round_on_gpu(x, exponent)
        return _decode(encode_kv(x, exponent), exponent, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _decode(codes: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    # On a CPU, a table of all codes takes half of the time of a conversion.
    all_codes = torch.arange(256, dtype=torch.uint8, device=codes.device)
    table = all_codes.view(torch.float8_e4m3fn).float()
    numbers = (table * 2.0**exponent).to(dtype)
    return numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY
