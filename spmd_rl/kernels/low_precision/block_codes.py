"""BlockCodes: a weight in few bits, and how weights are rounded to codes of any format, and back.

On GPUs kernels round, in `rounding_triton.py`, with the same bits.

Shape letters: N and K rows and columns of a weight. Codes and scales have the shapes of its format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.types.code_format import CodeFormat

_LEAST_CAPABILITY = (8, 9)  # of GPUs that round to e4m3


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
        return decode(self.format, self.codes, self.scales, self.num_columns, dtype)


Weight = Tensor | BlockCodes


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of codes or scales, by the name that a format gives it."""
    found: torch.dtype = getattr(torch, name)
    return found


def maxima(code_format: CodeFormat, values: Tensor, num_rows: int, first_row: int = 0) -> Tensor:
    """Return the largest magnitude in each block of a weight, as far as `values` have its rows.

    It is 0 where they have none. `values` are rows from `first_row` on of a weight of
    `num_rows` rows, or of several weights.
    Shape: values [..., n, K] fp32; returns [..., rows and columns of scales] fp32.
    """
    *several, num_held, num_columns = values.shape
    height = code_format.block_rows
    found = values.new_zeros(*several, *code_format.scale_shape((num_rows, num_columns)))
    if num_held == 0:
        return found
    block = code_format.block_columns
    whole = num_columns // block * block
    parts = [values[..., :whole].unflatten(-1, (-1, block))] if whole else []
    if whole < num_columns:
        parts.append(values[..., whole:].unsqueeze(-2))
    of_rows = torch.cat([_magnitude(part, -1) for part in parts], -1)
    before = first_row % height
    after = -(before + num_held) % height
    blocks = _magnitude(F.pad(of_rows, (0, 0, before, after)).unflatten(-2, (-1, height)), -2)
    found.narrow(-2, first_row // height, blocks.shape[-2]).copy_(blocks)
    return found


def encode(
    code_format: CodeFormat,
    values: Tensor,
    scales: Tensor,
    first_row: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the codes of some rows of a weight, from `first_row` on, rounded to nearest even.

    They are written to `out` where it is given.
    Shape: values [n, K] fp32, scales of the whole weight; returns the codes of n rows.
    """
    if _has_kernels(code_format, values):
        from spmd_rl.kernels.low_precision.rounding_triton import encode_on_gpu

        return encode_on_gpu(code_format, values, scales, first_row, out)
    codes = code_format.nearest(
        _times(code_format, values.float(), scales.float().reciprocal(), first_row)
    )
    return codes if out is None else out.copy_(codes)


def decode(
    code_format: CodeFormat,
    codes: Tensor,
    scales: Tensor,
    num_columns: int,
    dtype: torch.dtype,
    first_row: int = 0,
) -> Tensor:
    """Return the numbers that some rows of a weight stand for, which bfloat16 and fp32 hold.

    Shape: codes of n rows, scales of the whole weight; returns [n, K] of `dtype`.
    """
    numbers = code_format.numbers(codes, num_columns)
    return _times(code_format, numbers, scales.float(), first_row).to(dtype)


def rounded(
    code_format: CodeFormat, values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0
) -> Tensor:
    """Return what the codes of some rows of a weight stand for.

    Shape: values [n, K] fp32, scales of the whole weight; returns [n, K] of `dtype`.
    """
    if _has_kernels(code_format, values):
        from spmd_rl.kernels.low_precision.rounding_triton import rounded_on_gpu

        return rounded_on_gpu(code_format, values, scales, dtype, first_row)
    codes = encode(code_format, values, scales, first_row)
    return decode(code_format, codes, scales, values.shape[1], dtype, first_row)


def rounded_each(
    code_format: CodeFormat,
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
    if len(values) > 1 and all(_has_kernels(code_format, one) for one in values):
        from spmd_rl.kernels.low_precision.rounding_triton import round_each_on_gpu

        round_each_on_gpu(code_format, values, scales, out, first_row)
    else:
        for one, own, rows in zip(values, scales, out, strict=True):
            rows[:num_held] = rounded(code_format, one, own, dtype, first_row)
    return out


def quantised(code_format: CodeFormat, weight: Tensor) -> BlockCodes:
    """Return a whole weight as codes. Shape: weight [N, K]."""
    values = weight.float()
    scales = code_format.scales_of(maxima(code_format, values, len(values)))
    codes = encode(code_format, values, scales)
    return BlockCodes(
        codes, scales.to(torch_dtype(code_format.scale_dtype)), weight.shape[1], code_format
    )


def _times(code_format: CodeFormat, values: Tensor, factors: Tensor, first_row: int) -> Tensor:
    """Return rows from `first_row` on, each element times the factor of its block."""
    (num_rows, num_columns), block = values.shape, code_format.block_columns
    rows = torch.arange(first_row, first_row + num_rows, device=values.device)
    of_rows = factors.index_select(0, rows // code_format.block_rows)
    if num_columns % block == 0:
        return (values.unflatten(1, (-1, block)) * of_rows.unsqueeze(2)).flatten(1)
    return values * of_rows.repeat_interleave(block, 1)[:, :num_columns]


def _has_kernels(code_format: CodeFormat, values: Tensor) -> bool:
    """Return whether values are float32 rows on a GPU whose instructions know all codes."""
    if (
        not (code_format.has_kernels and values.is_cuda)
        or values.dtype != torch.float32
        or values.stride(-1) != 1
    ):
        return False
    return torch.cuda.get_device_capability(values.device) >= _LEAST_CAPABILITY


def _magnitude(values: Tensor, dim: int) -> Tensor:
    least, most = torch.aminmax(values, dim=dim)
    return torch.maximum(most, least.neg_())
