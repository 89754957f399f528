"""Calls of the kernels that write keys and values into pages of codes, for the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import KvCoding, KvExponents
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.rowwise.kv_write_triton import write_rows
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.rowwise.rope_triton import qk_norm_rope_into_pages

Written = tuple[Tensor, Tensor, Tensor]  # pages of keys and of values, and the counts


def written(
    k: Tensor, v: Tensor, slots: Tensor, shape: tuple[int, ...], exponents: KvExponents
) -> Written:
    keys, values = torch.zeros(2, *shape, dtype=torch.uint8)
    coding = KvCoding(exponents, torch.zeros(2, dtype=torch.int64))
    write_rows(keys, values, slots, k, v, coding)
    return keys, values, coding.counts


def rotated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    shape: tuple[int, ...],
    exponents: KvExponents,
) -> tuple[Tensor, *Written]:
    """Return the queries too."""
    keys, values = torch.zeros(2, *shape, dtype=torch.uint8)
    coding = KvCoding(exponents, torch.zeros(2, dtype=torch.int64))
    given = q, k, v, QkNorm(None, None, 1e-6), Rotary(*rotary)
    out = qk_norm_rope_into_pages(*given, KvSlots(keys, values, slots), coding)
    return out, keys, values, coding.counts
