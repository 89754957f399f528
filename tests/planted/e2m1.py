"""A format of weights that nobody else knows: e2m1 codes, in blocks of 32 columns of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.types.code_format import UNCODED, CodeFormat

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BETWEEN = (NUMBERS[1:] + NUMBERS[:-1]) / 2


class E2m1Groups(CodeFormat):
    """Byte j of a row has columns 2 j and 2 j + 1; the highest bit of a code is its sign."""

    name = "e2m1"
    bits = 4
    code_dtype = "uint8"
    scale_dtype = "bfloat16"
    scale_bytes = 2
    block_rows = 1
    block_columns = 32
    rule = f"e2m1 codes in groups of 32 columns with power-of-two scales; {UNCODED}"

    def scales_of(self, maxima: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(maxima / 6)
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-100, 100)
        return torch.ldexp(torch.ones_like(maxima), exponent)

    def nearest(self, scaled: Tensor) -> Tensor:
        codes = torch.bucketize(scaled.abs(), BETWEEN) | torch.signbit(scaled) * 8
        low, high = (
            torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32))
            .unflatten(1, (-1, 2))
            .to(torch.uint8)
            .unbind(2)
        )
        return low | high << 4

    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, :num_columns].long()
        return torch.where(nibbles < 8, 1.0, -1.0) * NUMBERS[nibbles & 7]


E2M1 = E2m1Groups()
