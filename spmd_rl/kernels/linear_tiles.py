"""Which tile a matrix product takes. Only speed depends on it; the table comes from benchmarks/kernels/tune_gemm.py."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows of x, rows of the weight and steps of K a program handles at a time; warps; stages of the load pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


ROW_BUCKETS = (16, 32, 64, 128, 256)
REFERENCE = Tile(128, 128, 64, 8, 3)

# (N, K): a tile for each row bucket; None takes the default.
TILES: dict[tuple[int, int], tuple[Tile | None, ...]] = {}

DEFAULTS = (
    Tile(16, 32, 256, 4, 4),
    Tile(32, 32, 256, 4, 4),
    Tile(64, 32, 128, 4, 5),
    Tile(128, 64, 64, 4, 5),
    Tile(128, 128, 64, 8, 4),
)


def choose_tile(m: int, n: int, k: int) -> Tile:
    bucket = min(bisect_left(ROW_BUCKETS, m), len(ROW_BUCKETS) - 1)
    listed = TILES.get((n, k))
    return (listed[bucket] if listed else None) or DEFAULTS[bucket]
