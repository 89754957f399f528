"""CodeFormat: how weights are rounded to codes of few bits, and back, whatever the codes are.

Code times scale is exactly a bfloat16 number, so a product with decoded weights is an ordinary
product of bfloat16. A scale depends on its block alone, and a code on its own value and its scale.
So any rows of a weight can be encoded alone, once the scales are known.

Shape letters: N and K rows and columns of a weight. Codes and scales have the shapes of its layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.types.code_layout import BLOCK, CodeLayout

_LEAST_CAPABILITY = (8, 9)  # of GPUs that round to e4m3


class CodeFormat(ABC):
    """A format of weights; a subclass says which scales there are, and which codes.

    On GPUs kernels round, in `rounding_triton.py`, with the same bits.
    """

    layout: ClassVar[CodeLayout]

    @abstractmethod
    def scales_of(self, maxima: Tensor) -> Tensor:
        """Return the scales of blocks with these largest magnitudes; NaN for what is too large.

        Shape: any, fp32; returns the same.
        """

    @abstractmethod
    def nearest(self, scaled: Tensor) -> Tensor:
        """Return the nearest codes to numbers that are divided by their scales.

        Shape: [n, K] fp32; returns the codes of n rows.
        """

    @abstractmethod
    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        """Return what codes are without scales. Shape: codes of n rows; returns [n, K] fp32."""

    @property
    def code_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.layout.code_dtype)
        return found

    @property
    def scale_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.layout.scale_dtype)
        return found

    def maxima(self, values: Tensor, num_rows: int, first_row: int = 0) -> Tensor:
        """Return the largest magnitude in each block of a weight, as far as `values` have its rows.

        It is 0 where they have none. `values` are rows from `first_row` on of a weight of
        `num_rows` rows, or of several weights.
        Shape: values [..., n, K] fp32; returns [..., rows and columns of scales] fp32.
        """
        *several, num_held, num_columns = values.shape
        height = self.layout.block_rows
        found = values.new_zeros(*several, *self.layout.scale_shape((num_rows, num_columns)))
        if num_held == 0:
            return found
        whole = num_columns // BLOCK * BLOCK
        parts = [values[..., :whole].unflatten(-1, (-1, BLOCK))] if whole else []
        if whole < num_columns:
            parts.append(values[..., whole:].unsqueeze(-2))
        of_rows = torch.cat([_magnitude(part, -1) for part in parts], -1)
        before = first_row % height
        after = -(before + num_held) % height
        blocks = _magnitude(F.pad(of_rows, (0, 0, before, after)).unflatten(-2, (-1, height)), -2)
        found.narrow(-2, first_row // height, blocks.shape[-2]).copy_(blocks)
        return found

    def encode(
        self, values: Tensor, scales: Tensor, first_row: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Return the codes of some rows of a weight, from `first_row` on, rounded to nearest even.

        They are written to `out` where it is given.
        Shape: values [n, K] fp32, scales of the whole weight; returns the codes of n rows.
        """
        if _has_kernels(values):
            from spmd_rl.kernels.low_precision.rounding_triton import encode_on_gpu

            return encode_on_gpu(self.layout, values, scales, first_row, out)
        codes = self.nearest(self._times(values.float(), scales.float().reciprocal(), first_row))
        return codes if out is None else out.copy_(codes)

    def decode(
        self,
        codes: Tensor,
        scales: Tensor,
        num_columns: int,
        dtype: torch.dtype,
        first_row: int = 0,
    ) -> Tensor:
        """Return the numbers that some rows of a weight stand for, which bfloat16 and fp32 hold.

        Shape: codes of n rows, scales of the whole weight; returns [n, K] of `dtype`.
        """
        numbers = self.numbers(codes, num_columns)
        return self._times(numbers, scales.float(), first_row).to(dtype)

    def rounded(
        self, values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0
    ) -> Tensor:
        """Return what the codes of some rows of a weight stand for.

        Shape: values [n, K] fp32, scales of the whole weight; returns [n, K] of `dtype`.
        """
        if _has_kernels(values):
            from spmd_rl.kernels.low_precision.rounding_triton import rounded_on_gpu

            return rounded_on_gpu(self.layout, values, scales, dtype, first_row)
        codes = self.encode(values, scales, first_row)
        return self.decode(codes, scales, values.shape[1], dtype, first_row)

    def rounded_each(
        self,
        values: Sequence[Tensor],
        scales: Sequence[Tensor],
        dtype: torch.dtype,
        first_row: int,
        num_rows: int,
    ) -> Tensor:
        """Return what the codes of the same rows of several weights stand for, and zeros up to
        `num_rows` rows.

        Shape: E values [n, K] fp32, E scales of a whole weight; returns [E, num_rows, K].
        """
        num_held, num_columns = values[0].shape
        out = values[0].new_empty(len(values), num_rows, num_columns, dtype=dtype)
        out[:, num_held:] = 0
        if len(values) > 1 and all(map(_has_kernels, values)):
            from spmd_rl.kernels.low_precision.rounding_triton import round_each_on_gpu

            round_each_on_gpu(self.layout, values, scales, out, first_row)
        else:
            for one, own, rows in zip(values, scales, out, strict=True):
                rows[:num_held] = self.rounded(one, own, dtype, first_row)
        return out

    def quantised(self, weight: Tensor) -> BlockCodes:
        """Return a whole weight as codes. Shape: weight [N, K]."""
        values = weight.float()
        scales = self.scales_of(self.maxima(values, len(values)))
        codes = self.encode(values, scales)
        return BlockCodes(codes, scales.to(self.scale_dtype), weight.shape[1], self)

    def _times(self, values: Tensor, factors: Tensor, first_row: int) -> Tensor:
        """Return rows from `first_row` on, each element times the factor of its block."""
        num_rows, num_columns = values.shape
        rows = torch.arange(first_row, first_row + num_rows, device=values.device)
        of_rows = factors.index_select(0, rows // self.layout.block_rows)
        if num_columns % BLOCK == 0:
            return (values.unflatten(1, (-1, BLOCK)) * of_rows.unsqueeze(2)).flatten(1)
        return values * of_rows.repeat_interleave(BLOCK, 1)[:, :num_columns]


@dataclass(frozen=True, eq=False)
class BlockCodes:
    """A weight [N, K] in few bits: codes, and a scale for each of its blocks."""

    codes: Tensor
    scales: Tensor
    num_columns: int  # K
    format: CodeFormat

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.codes.shape[0], self.num_columns

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for. Shape: [N, K] of `dtype`."""
        return self.format.decode(self.codes, self.scales, self.num_columns, dtype)


Weight = Tensor | BlockCodes


def _has_kernels(values: Tensor) -> bool:
    """Return whether values are float32 rows on a GPU whose instructions know all codes."""
    if not values.is_cuda or values.dtype != torch.float32 or values.stride(-1) != 1:
        return False
    return torch.cuda.get_device_capability(values.device) >= _LEAST_CAPABILITY


def _magnitude(values: Tensor, dim: int) -> Tensor:
    least, most = torch.aminmax(values, dim=dim)
    return torch.maximum(most, least.neg_())
