"""Which tile or ring a matrix product takes. Only speed depends on it (benchmarks/kernels/tune_gemm.py, on an H200).

Few rows leave only the weight's width to spread over the processor: so the narrower the weight, the narrower the tile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
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

    `n`, where it is no power of two, divides the weight's rows. `late` lets the next kernel begin once the last stage
    was asked for, not at once.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int = 4
    late: bool = False


class Share(NamedTuple):
    """What a block of `linear_cute` handles, as a `Ring`; so many `blocks` have the same rows of the weight."""

    m: int
    n: int
    k: int
    stages: int
    blocks: int


PART = 64  # a ring's steps of K come in whole parts: 128 bytes, the width of a swizzled tile in shared memory
LARGE_BYTES = 24 << 20  # a weight of so much comes in equal shares, or in tiles that gain nothing by beginning early
HEAD_ROWS = 1 << 15  # weights with more rows are the head's, whose product is long beside its two ends
EVEN_ROWS = 64  # of x: with more, a share reads more of x than of the weight
BLOCKS = 128  # shares for a Hopper GPU's 132 multiprocessors: the widths of models are multiples of it
BLOCK_BYTES = 220 << 10  # of shared memory for a ring's stages, if a multiprocessor holds one block
SHARED_ROWS = range(33, 257)  # of x: with fewer, what a block reads of it is little beside the weight
SHARED_WIDTH = 4096  # for more than EVEN_ROWS, cuBLAS or tiles are as good with wider weights
SHARED_BYTES = 224 << 10  # as BLOCK_BYTES, for shares
SHARED_STAGE_BYTES = 32 << 10
MULTIPROCESSORS = 132
WGMMA_ROWS = 64  # of its first operand
COLUMNS = 192  # of so many rows that a block adds up; with more, each reads too much of x
EIGHT = 8  # a share's rows are multiples of it
BUCKET = 32  # numbers of rows that take the same shares
STAGE_BYTES = 48 << 10  # a longer stage arrives late, a shorter one costs more barriers
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
        (4608, Tile(64, 128, 64, 4, 9)),
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
# Row bucket: rings for small weights up to so many rows, for those of heads and, above 64 rows of x, for all.
RINGS: dict[int, tuple[tuple[int, Ring], ...]] = {
    8: (
        (1024, Ring(8, 32, 512, 5)),
        (3072, Ring(8, 64, 256, 6)),
        (4096, Ring(8, 64, 256, 6, late=True)),
        (HEAD_ROWS, Ring(8, 64, 256, 6)),
        (ANY, Ring(16, 64, 128, 5)),
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


def choose_ring(m: int, n: int, k: int, gated: bool = False) -> Ring | None:
    """For a weight of [n, k], or of [2 n, k]; None where a tile is the faster, or K comes in no whole parts."""
    if k % PART:
        return None
    if n <= HEAD_ROWS and m <= EVEN_ROWS and 2 * n * k * (2 if gated else 1) >= LARGE_BYTES:
        return even_ring(m, n, gated)
    return _choose(GATED_RINGS if gated else RINGS, m, n)


def even_ring(m: int, n: int, gated: bool = False) -> Ring | None:
    """An equal share of a large weight for every multiprocessor: one block that fills it, or two with half of it each.

    None where the weight has no equal shares, or where so many blocks would read more of x than they save.
    """
    halves, rows = 2 if gated else 1, max(8, _power_of_two(m))
    share = 1 if n * halves <= BLOCKS * 64 or rows == 32 else 2
    height, left = divmod(n, share * BLOCKS)
    if left or not 8 <= height <= 128 or (share == 2 and rows > 16):
        return None
    if rows == 64:
        height = max(height, 32)
    room, bytes_of_step = BLOCK_BYTES // share, 2 * (halves * _power_of_two(height) + rows)
    steps = (512, 256, 128) if share == 1 else (128, 64)
    k = next((k for k in steps if k * bytes_of_step <= min(STAGE_BYTES, room // 3)), 128)
    return Ring(rows, height, k, room // (k * bytes_of_step))


def choose_share(m: int, n: int, k: int, gated: bool = False) -> Share | None:
    """For a weight of [n, k], or of [2 n, k]; None for few rows, small weights, heads, and too large shares."""
    halves = 2 if gated else 1
    large = 2 * halves * n * k >= LARGE_BYTES and n <= (HEAD_ROWS if m <= EVEN_ROWS else SHARED_WIDTH)
    if m not in SHARED_ROWS or not large or k % PART or n % EIGHT:
        return None
    return _best_share(_rounded(m, 1, BUCKET), n, halves)


@cache
def _best_share(m: int, n: int, halves: int) -> Share | None:
    """The equal shares for which least goes through shared memory."""
    found = [share for blocks in (1, 2) if (share := _share(m, n, halves, blocks)) is not None]
    return min(found, key=lambda share: _traffic(share, halves), default=None)


def _share(m: int, n: int, halves: int, blocks: int) -> Share | None:
    rows, height = _rounded(m, blocks), _rounded(n, MULTIPROCESSORS // blocks)
    if rows * -(-halves * height // WGMMA_ROWS) > COLUMNS:
        return None
    bytes_of_step = 2 * (rows + halves * height)
    k = next((k for k in (256, 128) if k * bytes_of_step <= SHARED_STAGE_BYTES), PART)
    return Share(rows, height, k, SHARED_BYTES // (k * bytes_of_step), blocks)


def _traffic(share: Share, halves: int) -> int:
    """Rows of operands that come into shared memory, and that wgmma reads there: x for every 64 rows of the weight."""
    height = halves * share.n
    return height + share.m + -(-height // WGMMA_ROWS) * (WGMMA_ROWS + share.m)


def _rounded(n: int, parts: int, unit: int = EIGHT) -> int:
    """A part's size, in whole units."""
    return -(-n // (parts * unit)) * unit


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _choose(table: Mapping[int, tuple[tuple[int, T], ...]], m: int, n: int) -> T | None:
    row = next((row for rows, row in table.items() if m <= rows), ())
    return next((one for width, one in row if n <= width), None)
