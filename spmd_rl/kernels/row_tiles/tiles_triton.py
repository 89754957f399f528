"""A program's tile, as kernels of attention read it."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def tile_of(table, num_tiles) -> tuple[tl.tensor, ...]:
    """Return the row of `table` of this program; the last tiles, which see most, are first."""
    at = table + num_tiles - 1 - tl.program_id(0)
    return (
        tl.load(at).to(tl.int64),
        tl.load(at + num_tiles),
        tl.load(at + 2 * num_tiles),
        tl.load(at + 3 * num_tiles),
        tl.load(at + 4 * num_tiles),
    )


@triton.jit
def rows_of(table, num_tiles, HEADS: tl.constexpr, ROWS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return a tile's rows among all of the pass, which are used, and their positions; then the
    tokens that they see, and where their sequence's pages begin.
    """
    first, count, before, page, begin = tile_of(table, num_tiles)
    row = begin + tl.arange(0, ROWS)
    end = before + tl.cdiv(tl.minimum(begin + ROWS, count), HEADS)
    return first * HEADS + row, row < count, before + row // HEADS, end, page
