"""Tile sizes of FlashAttention-4's forward kernel, which decide on the order of its sums."""

from __future__ import annotations

# rows of queries, the fewest that the tensor cores take, and keys of a block, as in training
TILE = (64, 128)
BOX_ROWS = 32  # keys or values of a page that one copy brings
