"""Experts in 4 bits, as gpt-oss's folders hold them: MXFP4, read and never written.

Each 32 columns of a row are 16 bytes, of which the low four bits are the earlier column. A code is
e2m1: a sign, two bits of exponent and one of mantissa. The scale of the 32 is a power of two, whose
exponent is a byte, 127 above it. Source: Open Compute Project, Microscaling Formats (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

CODES, SCALES = "_blocks", "_scales"  # how the names of both end
FOLDER = {"quant_method": "mxfp4"}
FILE_DTYPE = "U8"
GROUP, BYTES = 32, 16  # columns of a scale, and what they take
BIAS = 127  # of the exponent of a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def shape_of(codes: tuple[int, ...], scales: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the shape of weights [E, N, K] of codes [E, N, K / 32, 16] and scales [E, N, K / 32].

    Raises: ConfigError, beginning with `where`, for codes and scales that do not fit each other.
    """
    if len(codes) != 4 or codes[:-1] != scales or codes[-1] != BYTES:
        raise ConfigError(
            f"{where}: codes are {list(codes)} and scales {list(scales)}: expected {BYTES} bytes "
            f"of codes for each scale of {GROUP} columns"
        )
    return (*codes[:2], codes[2] * GROUP)


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Return what an expert's codes [N, G, 16] and scales [N, G] stand for: [N, 32 G], bfloat16.

    Every number is exact.
    """
    import torch

    table = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    values = table[pairs.long()]
    exponents = scales.to(torch.int32).unsqueeze(-1) - BIAS
    return torch.ldexp(values, exponents).flatten(1).bfloat16()
