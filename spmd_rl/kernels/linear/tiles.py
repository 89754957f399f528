"""Tile, ring or share of a GEMM. Only speed depends on it, not bits.

The tables were tuned on an H200 (benchmarks/kernels/tune_gemm.py). With few rows of x, only the
weight's width can be spread over the processor. So the narrower the weight, the narrower the tile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import NamedTuple, TypeVar

T = TypeVar("T")
S = TypeVar("S", "Tile", "Ring")


class Tile(NamedTuple):
    """Sizes of a program of `triton_gemm`.

    A step takes `m` rows of x, `n` rows of the weight and `k` of K, with `warps` warps and `stages`
    of the load pipeline. `swap` multiplies weight by x instead of x by weight, so that few rows of
    x fill the narrow side of the tensor cores.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False


class Ring(NamedTuple):
    """Sizes of a program of `gluon`: `stages` steps of `k` are in shared memory or on their way.

    `late` lets the next kernel begin when the last stage was asked for, not at once.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int = 4
    late: bool = False


class Share(NamedTuple):
    """Sizes of a block of `cute`, as in `Ring`; `blocks` blocks have the same rows of the weight.

    A multiprocessor gets one block at most. There are as many shares as the weight needs, and the
    last one may overlap. `early` stages of the weight are asked for before the kernel ahead has
    ended. `swap` multiplies x by the weight, so that wgmma takes 64 rows of x at a time.
    """

    m: int
    n: int
    k: int
    stages: int
    early: int
    blocks: int
    swap: bool = False

    @property
    def most_shares(self) -> int:
        return MULTIPROCESSORS // self.blocks

    @property
    def padded(self) -> int:
        """Rows of shared memory for a tile of the weight; its swizzle repeats every eight rows."""
        return _rounded(self.n, 1)


# Steps of K of a ring are multiples of this: 128 bytes, the width of a swizzled tile.
PART = 64
# Weights of this size take shares, or tiles that gain nothing by beginning early.
LARGE_BYTES = 24 << 20
FEW_ROWS_BYTES = 20 << 20  # least size of a weight for shares with few rows of x
# Weights with more rows are those of heads. Their product is long, so its two ends do not count.
HEAD_ROWS = 1 << 15
SHARED_ROWS = range(1, 257)  # numbers of rows of x that shares are for
# With these numbers of rows of x, smaller weights take shares too, from this width on.
DOZENS = range(33, 65)
DOZENS_BYTES, DOZENS_WIDTH = 8 << 20, 2560
# With more rows of x, cuBLAS or tiles are as good for weights of more rows than this.
SHARED_WIDTH = 4096
SHARED_BYTES = 224 << 10  # shared memory for a block's stages
STAGE_BYTES = 32 << 10  # a longer stage arrives late, a shorter one costs more barriers
MULTIPROCESSORS = 132
WGMMA_ROWS = 64  # rows of wgmma's first operand
COLUMNS = 192  # most columns of sums of a block; with more, each block reads too much of x
# A share's rows are multiples of UNIT, or of LOW_UNIT where one wgmma takes them all.
UNIT, LOW_UNIT = 8, 4
# Up to these numbers of rows of x, and then up to each multiple of BUCKET, shares are the same.
BUCKETS = (8, 16)
BUCKET = 32
REFERENCE = Tile(128, 128, 64, 8, 3)
# Of a sum in several chains: for many rows of x, and sums of a thread beside which it keeps others.
CHAINED = Tile(128, 128, 64, 8, 4)
THREAD_SUMS = 64
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
# The same for both halves of a gated product, where one kernel for them is faster. `n` counts the
# rows of one half.
GATED_TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    16: ((4096, Tile(16, 64, 128, 4, 6, swap=True)), (ANY, Tile(16, 64, 128, 4, 3, swap=True))),
    32: ((4096, Tile(32, 64, 128, 4, 5, swap=True)), (ANY, Tile(64, 64, 64, 4, 4, swap=True))),
    64: ((4096, Tile(64, 32, 128, 4, 6)), (ANY, Tile(64, 64, 64, 4, 4, swap=True))),
    128: ((4096, Tile(64, 64, 128, 4, 4, swap=True)),),
}
# Row bucket: rings for weights up to so many rows, if these are small or heads, and for all weights
# above 64 rows of x.
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
# Weights that take another ring than others of their width: bucket, n, k.
RINGS_OF: dict[tuple[int, int, int], Ring] = {
    (8, 4096, 1024): Ring(8, 64, 128, 8),
    (16, 4096, 1024): Ring(16, 64, 128, 8),
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


def in_chains(size: S, part: int) -> S:
    """Return a size of as much memory whose steps divide a part of K, a multiple of `PART`."""
    k = gcd(size.k, part)
    return size._replace(k=k, stages=size.stages * (size.k // k))


def choose_chained_tile(m: int, n: int, part: int) -> Tile:
    """Choose a tile for sums of several chains, each of which has a part of K."""
    tile = choose_tile(m, n)
    if m > max(TILES) or tile.m * tile.n > THREAD_SUMS * 32 * tile.warps:
        tile = CHAINED
    return in_chains(tile, part)


def choose_ring(m: int, n: int, k: int, gated: bool = False) -> Ring | None:
    """Choose a ring for a weight [n, k] or, if gated, [2 n, k].

    Returns None where a tile is faster, or K is not a multiple of `PART`.
    """
    if k % PART or _is_large(n, k, gated):
        return None
    if gated:
        return _choose(GATED_RINGS, m, n)
    return RINGS_OF.get((_bucket(RINGS, m), n, k)) or _choose(RINGS, m, n)


def choose_share(m: int, n: int, k: int, gated: bool = False) -> Share | None:
    """Choose a share for a weight [n, k] or, if gated, [2 n, k].

    Returns None for small weights, heads, and shares that would be too large.
    """
    fits = m in SHARED_ROWS and (m < DOZENS.stop or n <= SHARED_WIDTH)
    least = FEW_ROWS_BYTES if m < DOZENS.start else LARGE_BYTES
    if m in DOZENS and n >= DOZENS_WIDTH:
        least = DOZENS_BYTES
    if not fits or not _is_large(n, k, gated, least) or k % PART or n % UNIT:
        return None
    rows = next((rows for rows in BUCKETS if m <= rows), _rounded(m, 1, BUCKET))
    share = _best_share(rows, n, 2 if gated else 1)
    if share is None or not _is_large(n, k, gated):
        return share
    return share._replace(early=-(-share.stages // 2))  # shorter products lose by it


def _is_large(n: int, k: int, gated: bool, least: int = LARGE_BYTES) -> bool:
    return n <= HEAD_ROWS and 2 * n * k * (2 if gated else 1) >= least


@cache
def _best_share(m: int, n: int, halves: int) -> Share | None:
    """Return the equal shares that cost a multiprocessor least."""
    layouts = [(1, False)]
    if m not in BUCKETS:  # with so few rows, a block reads little of x
        layouts += [(2, False), (2, True), (4, True)]
    shares = [_share(m, n, halves, blocks, swap) for blocks, swap in layouts]
    possible = [share for share in shares if share is not None]
    return min(possible, key=lambda share: _cost(share, halves), default=None)


def _share(m: int, n: int, halves: int, blocks: int, swap: bool) -> Share | None:
    rows, height = _rounded(m, blocks), _rounded(n, MULTIPROCESSORS // blocks, LOW_UNIT)
    if height > WGMMA_ROWS or swap:
        height = _rounded(height, 1)
    first, second = (rows, height) if swap else (halves * height, rows)
    if second * -(-first // WGMMA_ROWS) > COLUMNS or (swap and (halves > 1 or rows % WGMMA_ROWS)):
        return None
    bytes_of_step = 2 * (rows + halves * _rounded(height, 1))
    k = 2 * PART if 2 * PART * bytes_of_step <= STAGE_BYTES else PART
    stages = SHARED_BYTES // (k * bytes_of_step)
    if not swap and _rows_behind(halves * height) > stages * rows:
        return None
    return Share(rows, height, k, stages, stages // 2, blocks, swap)


def _rows_behind(height: int) -> int:
    """Return how many rows wgmma reads behind a tile. After the last one they must be x's ring."""
    return -height % WGMMA_ROWS


def _cost(share: Share, halves: int) -> int:
    """Return how many rows of operands pass through shared memory.

    All rows come in once, and wgmma reads its second operand for every 64 rows of its first. With
    many rows of x, multiplying counts too: as much as two rows for each of the second operand's.
    """
    height = halves * share.n
    first, second = (share.m, height) if share.swap else (height, share.m)
    multiplied = 2 * second if share.m * share.blocks > WGMMA_ROWS else 0
    return height + share.m + -(-first // WGMMA_ROWS) * (WGMMA_ROWS + second + multiplied)


def _rounded(n: int, parts: int, unit: int = UNIT) -> int:
    """Return the size of one of `parts` equal parts of n, in whole units."""
    return -(-n // (parts * unit)) * unit


def _choose(table: Mapping[int, tuple[tuple[int, T], ...]], m: int, n: int) -> T | None:
    return next((one for width, one in table.get(_bucket(table, m), ()) if n <= width), None)


def _bucket(table: Mapping[int, object], m: int) -> int:
    """Return the table's key for m rows, or 0 where m is above all keys."""
    return next((rows for rows in table if m <= rows), 0)
