"""Which tile a matrix product takes. Only speed depends on it (benchmarks/kernels/tune_gemm.py, on an H200).

Few rows leave only the weight's width to spread over the processor: so the narrower the weight, the narrower the tile.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Tile(NamedTuple):
    """What a program handles at a time, and how.

    `m` rows of x, `n` rows of the weight, `k` steps of K; `warps`; `stages` of the load pipeline; `swap` multiplies
    weight by x instead of x by weight, so that few rows of x fill the tensor cores' narrow side.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False


REFERENCE = Tile(128, 128, 64, 8, 3)
ANY = 1 << 31

# Row bucket: tiles for weights up to so many rows.
TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    16: (
        (8192, Tile(16, 64, 256, 4, 5, swap=True)),
        (10240, Tile(16, 64, 128, 4, 5, swap=True)),
        (16384, Tile(16, 128, 128, 4, 4, swap=True)),
        (20480, Tile(16, 256, 64, 4, 5, swap=True)),
        (ANY, Tile(16, 64, 128, 4, 5, swap=True)),
    ),
    32: (
        (5120, Tile(16, 64, 256, 4, 5, swap=True)),
        (8192, Tile(32, 64, 256, 4, 4, swap=True)),
        (16384, Tile(32, 128, 128, 4, 4, swap=True)),
        (20480, Tile(32, 256, 64, 4, 5, swap=True)),
        (32768, Tile(32, 64, 256, 4, 4, swap=True)),
        (ANY, Tile(32, 128, 128, 4, 4, swap=True)),
    ),
    64: (
        (2048, Tile(64, 16, 256, 4, 5)),
        (3072, Tile(32, 64, 128, 4, 8, swap=True)),
        (4608, Tile(32, 64, 256, 4, 4, swap=True)),
        (8192, Tile(64, 64, 128, 4, 6)),
        (16384, Tile(64, 128, 128, 4, 4)),
        (32768, Tile(64, 256, 64, 8, 4, swap=True)),
        (ANY, Tile(64, 128, 128, 4, 4)),
    ),
    128: (
        (2048, Tile(32, 64, 256, 4, 4, swap=True)),
        (4608, Tile(64, 64, 128, 4, 6)),
        (8192, Tile(128, 64, 64, 4, 8)),
        (16384, Tile(128, 128, 64, 4, 5)),
        (32768, Tile(128, 256, 64, 8, 4, swap=True)),
        (ANY, Tile(128, 128, 64, 4, 5, swap=True)),
    ),
    256: (
        (1024, Tile(32, 64, 256, 4, 4, swap=True)),
        (2048, Tile(64, 64, 128, 4, 6)),
        (4608, Tile(64, 128, 128, 4, 4)),
        (8192, Tile(128, 128, 64, 4, 5)),
        (16384, Tile(256, 128, 64, 8, 4)),
        (32768, Tile(128, 128, 64, 4, 5)),
        (ANY, Tile(128, 256, 64, 8, 4)),
    ),
}
# The same for both halves of a gated product, where one kernel for them is the faster; `n` counts rows of one half.
GATED_TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    16: ((4096, Tile(16, 64, 128, 4, 6, swap=True)), (ANY, Tile(16, 64, 128, 4, 3, swap=True))),
    32: ((4096, Tile(32, 64, 128, 4, 5, swap=True)), (ANY, Tile(32, 64, 128, 4, 3, swap=True))),
    64: ((4096, Tile(64, 32, 128, 4, 6)), (ANY, Tile(64, 64, 64, 4, 4, swap=True))),
    128: ((4096, Tile(64, 64, 128, 4, 4, swap=True)),),
}


def choose_tile(m: int, n: int) -> Tile:
    buckets = tuple(TILES)
    row = TILES[buckets[min(bisect_left(buckets, m), len(buckets) - 1)]]
    return next(tile for width, tile in row if n <= width)


def choose_gated_tile(m: int, n: int) -> Tile | None:
    row = next((row for rows, row in GATED_TILES.items() if m <= rows), ())
    return next((tile for width, tile in row if n <= width), None)
