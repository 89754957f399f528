"""Inputs of a decoding step, made on the GPU in one launch, so that no step waits for the host."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

BLOCK = 128


class DecodeInputs(NamedTuple):
    """Inputs of a decoding step. Shape: all [B] int64, but `num_keys` int32.

    `within` is the position in the answer of the token to be drawn.
    """

    tokens: Tensor
    positions: Tensor
    within: Tensor
    slots: Tensor
    num_keys: Tensor


def decode_inputs(
    newest: Tensor,
    rows: Tensor,
    positions: Tensor,
    answer_starts: Tensor,
    pages: Tensor,
    page_size: int,
) -> DecodeInputs:
    """Return each row's newest token and its slot in the cache, and add 1 to `positions`.

    An entry that no row uses names the last entry of `newest`, which belongs to no row: its K/V is
    not written (slot -1).
    Shape: newest [num_rows + 1] int64; rows, positions and answer_starts [B] int64; pages [B, P]
    int32.
    """
    batch = len(rows)
    tokens, at, within, slots = torch.empty(4, batch, dtype=torch.int64, device=rows.device)
    num_keys = torch.empty(batch, dtype=torch.int32, device=rows.device)
    _inputs[(triton.cdiv(batch, BLOCK),)](
        newest, rows, positions, answer_starts, pages, tokens, at, within, slots, num_keys,
        batch, len(newest) - 1, pages.shape[1], page_size, BLOCK, **overlapping(),
    )  # fmt: skip
    return DecodeInputs(tokens, at, within, slots, num_keys)


@triton.jit
def _inputs(
    newest, rows, positions, answer_starts, pages, tokens, at, within, slots, num_keys,
    batch, nobody, width, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < batch
    wait()
    row = tl.load(rows + entry, mask=inside, other=0)
    position = tl.load(positions + entry, mask=inside, other=0)
    page = tl.load(
        pages + entry.to(tl.int64) * width + position // PAGE_SIZE, mask=inside, other=0
    ).to(tl.int64)
    slot = tl.where(row < nobody, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(tokens + entry, tl.load(newest + row, mask=inside, other=0), mask=inside)
    tl.store(at + entry, position, mask=inside)
    tl.store(
        within + entry,
        position + 1 - tl.load(answer_starts + entry, mask=inside, other=0),
        mask=inside,
    )
    tl.store(slots + entry, slot, mask=inside)
    tl.store(num_keys + entry, (position + 1).to(tl.int32), mask=inside)
    tl.store(positions + entry, tl.where(row < nobody, position + 1, 0), mask=inside)
