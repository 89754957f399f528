"""Weights in 4 bits: whole numbers from -7 to 7, and a scale for each 128 columns of a row.

A code has three significant bits and a scale five, so their product has the eight of bfloat16: it
is exact, although a scale is no power of two. Codes are symmetric, so that a scale follows from a
magnitude alone, whose largest one ranks find together.

Byte j of a row's block has column j in its low four bits, and column 64 + j in its high ones, each
as a two's complement. Columns beyond the weight are zeros. No torch until numbers are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.types.code_format import UNCODED, CodeFormat

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_CODE = 7
# Of the least scale, every product is a normal number of bfloat16. Of the largest, the largest
# magnitude is that of the e4m3 format, which weights do not reach.
LEAST_SCALE, MOST_SCALE = 2.0**-117, 2.0**13
_HALF = 64  # columns of a block
_ROUNDED_BITS = 19  # of float32's mantissa, of which a scale keeps four


class Int4Groups(CodeFormat):
    """`weights = "int4"`."""

    name = "int4"
    bits = 4
    code_dtype = "uint8"
    scale_dtype = "bfloat16"
    scale_bytes = 2
    block_rows = 1
    block_columns = 2 * _HALF
    rule = (
        "codes from -7 to 7 in groups of 128 columns of a row with scales of 5 significant bits; "
        f"{UNCODED}"
    )
    has_kernels = True

    def scales_of(self, maxima: Tensor) -> Tensor:
        """Return the least scale of five significant bits whose 7-fold is not below the maximum.

        Scales are kept within their range. A maximum that is too large for it, above 57,344 or not
        finite, gives NaN, and so does all of its block.
        """
        import torch

        # a divisor on the same device: by a number of the host, a GPU multiplies with its inverse
        least = maxima / torch.full_like(maxima, LARGEST_CODE)
        dropped = (1 << _ROUNDED_BITS) - 1
        bits = (least.view(torch.int32) + dropped) & ~dropped
        scales = bits.view(torch.float32).clamp(LEAST_SCALE, MOST_SCALE)
        return scales.masked_fill_(~(maxima <= LARGEST_CODE * MOST_SCALE), torch.nan)

    def nearest(self, scaled: Tensor) -> Tensor:
        import torch

        codes = scaled.round().nan_to_num_(0).to(torch.int8).view(torch.uint8)
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % self.block_columns))
        low, high = padded.unflatten(1, (-1, 2, _HALF)).unbind(2)
        return ((low & 15) | (high << 4)).flatten(1)

    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        import torch

        packed = codes.unflatten(1, (-1, _HALF))
        nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, :num_columns]
        return ((nibbles ^ 8).float()) - 8


INT4 = Int4Groups()
