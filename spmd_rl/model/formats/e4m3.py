"""Weights in 8 bits: e4m3 codes, and a power of two as the scale of each block of 128 x 128.

DeepSeek and Qwen publish folders of such weights. No torch until numbers are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.types.code_format import UNCODED, CodeFormat

if TYPE_CHECKING:
    from torch import Tensor

# The least and the largest exponent of a scale. Of the least, every code is a normal number of
# bfloat16. Of the largest, bfloat16 still holds 2^120 times the scale, which kernels multiply by.
LEAST_EXPONENT, MOST_EXPONENT = -117, 7
_MANTISSA_OF_MOST = 0x600000  # of 448 = 1.75 * 2^8, as float32 has it
_BIAS = 127  # of float32's exponent


class E4m3Blocks(CodeFormat):
    """`weights = "e4m3"`."""

    name = "e4m3"
    bits = 8
    code_dtype = "float8_e4m3fn"
    scale_dtype = "float32"
    scale_bytes = 4
    block_rows = block_columns = 128
    rule = f"e4m3 codes in blocks of 128 x 128 with power-of-two scales; {UNCODED}"
    has_kernels = True
    folder = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}  # noqa: RUF012
    file_dtype = "F8_E4M3"

    def scales_of(self, maxima: Tensor) -> Tensor:
        """Return the least power of two whose multiple 448 is not below the maximum.

        Exponents are kept within their range. A maximum that is too large for it, above 57,344 or
        not finite, gives NaN, and so does all of its block.
        """
        import torch

        bits = maxima.contiguous().view(torch.int32)
        exponent = (bits >> 23) - (_BIAS + 8)
        exponent += (bits & 0x7FFFFF) > _MANTISSA_OF_MOST
        is_too_large = exponent > MOST_EXPONENT  # NaN and infinity too
        exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT)
        scales = ((exponent + _BIAS) << 23).view(torch.float32)
        return scales.masked_fill_(is_too_large, torch.nan)

    def nearest(self, scaled: Tensor) -> Tensor:
        import torch

        return scaled.to(torch.float8_e4m3fn)

    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        return codes.float()


E4M3 = E4m3Blocks()
