"""Rounding of weights to e4m3 codes with power-of-two scales, and back.

Code times scale is exactly a bfloat16 number, so a product with decoded weights is an ordinary
product of bfloat16. A scale depends on its block alone, and a code on its own value and its scale.
So any rows of a weight can be encoded alone, once the scales are known.

Shape letters: N and K rows and columns of a weight; a weight has [ceil(N/128), ceil(K/128)] scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import BLOCK, CODE, BlockCodes, num_blocks

# The least and the largest exponent of a scale. Of the least, every code is a normal number of
# bfloat16. Of the largest, bfloat16 still holds 2^120 times the scale, which kernels multiply by.
LEAST_EXPONENT, MOST_EXPONENT = -117, 7
_MANTISSA_OF_MOST = 0x600000  # of 448 = 1.75 * 2^8, as float32 has it
_BIAS = 127  # of float32's exponent
_LEAST_CAPABILITY = (8, 9)  # of GPUs that round to e4m3


def block_maxima(values: Tensor, num_rows: int, first_row: int = 0) -> Tensor:
    """Return the largest magnitude in each block of a weight, as far as `values` have its rows.

    It is 0 where they have none. `values` are rows from `first_row` on of a weight of `num_rows`
    rows, or of several weights.
    Shape: values [..., n, K] fp32; returns [..., ceil(N/128), ceil(K/128)] fp32.
    """
    *several, num_held, num_columns = values.shape
    maxima = values.new_zeros(*several, *num_blocks((num_rows, num_columns)))
    if num_held == 0:
        return maxima
    whole = num_columns // BLOCK * BLOCK
    parts = [values[..., :whole].unflatten(-1, (-1, BLOCK))] if whole else []
    if whole < num_columns:
        parts.append(values[..., whole:].unsqueeze(-2))
    of_rows = torch.cat([_magnitude(part, -1) for part in parts], -1)
    before = first_row % BLOCK
    after = -(before + num_held) % BLOCK
    blocks = _magnitude(F.pad(of_rows, (0, 0, before, after)).unflatten(-2, (-1, BLOCK)), -2)
    maxima.narrow(-2, first_row // BLOCK, blocks.shape[-2]).copy_(blocks)
    return maxima


def block_scales(maxima: Tensor) -> Tensor:
    """Return the least power of two for each block whose multiple 448 is not below the maximum.

    Exponents are kept within their range. A maximum that is too large for it, above 57,344 or not
    finite, gives NaN, and so does all of its block.
    Shape: any, fp32; returns the same.
    """
    bits = maxima.contiguous().view(torch.int32)
    exponent = (bits >> 23) - (_BIAS + 8)
    exponent += (bits & 0x7FFFFF) > _MANTISSA_OF_MOST
    is_too_large = exponent > MOST_EXPONENT  # NaN and infinity too
    exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT)
    scales = ((exponent + _BIAS) << 23).view(torch.float32)
    return scales.masked_fill_(is_too_large, torch.nan)


def encode(values: Tensor, scales: Tensor, first_row: int = 0) -> Tensor:
    """Return the codes of some rows of a weight, from `first_row` on, rounded to nearest even.

    Shape: values [n, K] fp32, scales of the whole weight; returns [n, K] e4m3.
    """
    if _has_kernels(values):
        from spmd_rl.kernels.low_precision.rounding_triton import encode_on_gpu

        return encode_on_gpu(values, scales, first_row)
    inverse = scales.reciprocal()  # exact, as scales are powers of two
    return _times(values.float(), inverse, first_row).to(CODE)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0) -> Tensor:
    """Return the numbers that some rows of a weight stand for, which bfloat16 and fp32 hold.

    Shape: codes [n, K] e4m3, scales of the whole weight; returns [n, K] of `dtype`.
    """
    return _times(codes.float(), scales, first_row).to(dtype)


def rounded(values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0) -> Tensor:
    """Return what the codes of some rows of a weight stand for.

    Shape: values [n, K] fp32, scales of the whole weight; returns [n, K] of `dtype`.
    """
    if _has_kernels(values):
        from spmd_rl.kernels.low_precision.rounding_triton import rounded_on_gpu

        return rounded_on_gpu(values, scales, dtype, first_row)
    return decode(encode(values, scales, first_row), scales, dtype, first_row)


def quantised(weight: Tensor) -> BlockCodes:
    """Return a whole weight in 8 bits. Shape: weight [N, K]."""
    values = weight.float()
    scales = block_scales(block_maxima(values, len(values)))
    return BlockCodes(encode(values, scales), scales)


def _has_kernels(values: Tensor) -> bool:
    """Return whether values are float32 rows on a GPU whose instructions know e4m3."""
    if not values.is_cuda or values.dtype != torch.float32 or values.stride(-1) != 1:
        return False
    return torch.cuda.get_device_capability(values.device) >= _LEAST_CAPABILITY


def _magnitude(values: Tensor, dim: int) -> Tensor:
    least, most = torch.aminmax(values, dim=dim)
    return torch.maximum(most, least.neg_())


def _times(values: Tensor, factors: Tensor, first_row: int) -> Tensor:
    """Return rows from `first_row` on, each element times the factor of its block."""
    num_rows, num_columns = values.shape
    rows = torch.arange(first_row, first_row + num_rows, device=values.device) // BLOCK
    of_rows = factors.index_select(0, rows)
    if num_columns % BLOCK == 0:
        return (values.unflatten(1, (-1, BLOCK)) * of_rows.unsqueeze(2)).flatten(1)
    return values * of_rows.repeat_interleave(BLOCK, 1)[:, :num_columns]
