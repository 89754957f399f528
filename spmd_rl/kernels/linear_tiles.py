"""Which tile or ring a matrix product takes. Only speed depends on it (benchmarks/kernels/tune_gemm.py, on an H200).

Few rows leave only the weight's width to spread over the processor: so the narrower the weight, the narrower the tile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")


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


class Ring(NamedTuple):
    """What a program of `linear_gluon` handles: `stages` of `k` steps lie in shared memory or are on their way.

    `late` lets the next kernel begin once the last stage was asked for, not at once.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int = 4
    late: bool = False


PART = 64  # a ring's steps of K come in whole parts: 128 bytes, the width of a swizzled tile in shared memory
LARGE_BYTES = 24 << 20  # in a decoding step, a weight of so much gains nothing from a product that begins early
HEAD_ROWS = 1 << 15  # weights with more rows are the head's, whose product is long beside its two ends
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
    32: ((4096, Tile(32, 64, 128, 4, 5, swap=True)), (ANY, Tile(64, 64, 64, 4, 4, swap=True))),
    64: ((4096, Tile(64, 32, 128, 4, 6)), (ANY, Tile(64, 64, 64, 4, 4, swap=True))),
    128: ((4096, Tile(64, 64, 128, 4, 4, swap=True)),),
}
# Row bucket: rings for weights up to so many rows. Only for those that `takes_ring` admits.
RINGS: dict[int, tuple[tuple[int, Ring], ...]] = {
    8: (
        (1024, Ring(8, 32, 512, 5)),
        (3072, Ring(8, 64, 256, 6)),
        (4096, Ring(8, 64, 256, 6, late=True)),
        (HEAD_ROWS, Ring(8, 64, 256, 6)),
        (ANY, Ring(8, 64, 256, 3)),
    ),
    16: (
        (2560, Ring(16, 32, 512, 4)),
        (3072, Ring(16, 64, 256, 5)),
        (4096, Ring(16, 64, 256, 5, late=True)),
        (HEAD_ROWS, Ring(16, 64, 256, 5)),
        (ANY, Ring(16, 64, 128, 5)),
    ),
    32: (
        (1024, Ring(16, 32, 512, 4, late=True)),
        (2560, Ring(32, 32, 256, 6)),
        (4096, Ring(32, 64, 128, 9, late=True)),
        (HEAD_ROWS, Ring(32, 64, 256, 4)),
        (ANY, Ring(32, 64, 128, 4)),
    ),
    64: (
        (1024, Ring(32, 32, 256, 6)),
        (2560, Ring(32, 64, 256, 4, late=True)),
        (4096, Ring(64, 64, 128, 6, late=True)),
        (HEAD_ROWS, Ring(64, 64, 128, 6)),
        (ANY, Ring(64, 64, 128, 3)),
    ),
    128: ((1024, Ring(32, 64, 256, 4)), (2560, Ring(64, 64, 128, 6))),
    256: ((1024, Ring(64, 64, 128, 6)),),
}
GATED_RINGS: dict[int, tuple[tuple[int, Ring], ...]] = {
    8: ((4096, Ring(8, 64, 128, 6, late=True)),),
    16: ((4096, Ring(16, 64, 256, 3, late=True)),),
    32: ((4096, Ring(32, 64, 128, 5, late=True)),),
    64: ((4096, Ring(64, 64, 128, 4, late=True)),),
    128: ((4096, Ring(64, 64, 128, 4)),),
}


def choose_tile(m: int, n: int) -> Tile:
    buckets = tuple(TILES)
    row = TILES[buckets[min(bisect_left(buckets, m), len(buckets) - 1)]]
    return next(tile for width, tile in row if n <= width)


def choose_gated_tile(m: int, n: int) -> Tile | None:
    return _choose(GATED_TILES, m, n)


def takes_ring(n: int, k: int, gated: bool = False) -> bool:
    """Whether a ring takes a weight of [n, k], or of [2 n, k], at all."""
    small = 2 * n * k * (2 if gated else 1) < LARGE_BYTES
    return k % PART == 0 and (small or n > HEAD_ROWS)


def choose_ring(m: int, n: int, gated: bool = False) -> Ring | None:
    return _choose(GATED_RINGS if gated else RINGS, m, n)


def _choose(table: Mapping[int, tuple[tuple[int, T], ...]], m: int, n: int) -> T | None:
    row = next((row for rows, row in table.items() if m <= rows), ())
    return next((one for width, one in row if n <= width), None)
