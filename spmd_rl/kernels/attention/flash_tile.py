"""Tile sizes of FlashAttention-4's forward kernel, which decide on the order of its sums."""

from __future__ import annotations

ROWS = 64  # of queries, the fewest that the tensor cores take
TRAINING_ROWS = 128  # of queries, where a tile is named at all
LARGE_HEAD = 128
BOX_ROWS = 32  # keys or values of a page that one copy brings


def key_block(head_dim: int) -> int:
    """Return how many keys are a block; what is in shared memory bounds it for large heads."""
    return 128 if head_dim <= LARGE_HEAD else 64
