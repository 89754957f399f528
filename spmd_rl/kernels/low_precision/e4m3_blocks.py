"""Weights in 8 bits: e4m3 codes, and a power of two as the scale of each block of 128 x 128."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.code_format import CodeFormat
from spmd_rl.types import code_layout
from spmd_rl.types.code_layout import CodeLayout

CODE = torch.float8_e4m3fn
# The least and the largest exponent of a scale. Of the least, every code is a normal number of
# bfloat16. Of the largest, bfloat16 still holds 2^120 times the scale, which kernels multiply by.
LEAST_EXPONENT, MOST_EXPONENT = -117, 7
_MANTISSA_OF_MOST = 0x600000  # of 448 = 1.75 * 2^8, as float32 has it
_BIAS = 127  # of float32's exponent


class E4m3Blocks(CodeFormat):
    """`weights = "e4m3"`."""

    layout: ClassVar[CodeLayout] = code_layout.E4M3

    def scales_of(self, maxima: Tensor) -> Tensor:
        """Return the least power of two whose multiple 448 is not below the maximum.

        Exponents are kept within their range. A maximum that is too large for it, above 57,344 or
        not finite, gives NaN, and so does all of its block.
        """
        bits = maxima.contiguous().view(torch.int32)
        exponent = (bits >> 23) - (_BIAS + 8)
        exponent += (bits & 0x7FFFFF) > _MANTISSA_OF_MOST
        is_too_large = exponent > MOST_EXPONENT  # NaN and infinity too
        exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT)
        scales = ((exponent + _BIAS) << 23).view(torch.float32)
        return scales.masked_fill_(is_too_large, torch.nan)

    def nearest(self, scaled: Tensor) -> Tensor:
        return scaled.to(CODE)

    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        return codes.float()


E4M3 = E4m3Blocks()
