"""Tiles of grouped GEMMs. Only speed depends on them, not bits.

With few rows an expert has one to a few of them. A tile then is as low as tensor cores allow, and
weights are their first operand. With many rows, an expert fills tiles of 128 rows.
"""

from __future__ import annotations

from typing import NamedTuple


class GroupedTile(NamedTuple):
    """Sizes of a program: `m` rows of an expert, `n` rows of its weight, `k` of K in a step.

    `swap` multiplies weight by rows instead of rows by weight. Of `group` tiles of rows, all have
    one tile of the weight before any has the next.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False
    group: int = 8


class GradTile(NamedTuple):
    """Sizes of a program of a weight's gradient: [m, n] of it, `k` rows of an expert in a step.

    `stages` counts those that hold rows. Rows that are loaded by index have another for the index.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


class Tiles(NamedTuple):
    """Tiles for gate and up with their activation, gate and up alone, down, and gradients of rows.

    All have the same number of rows, as they share the list of tiles.
    """

    gated: GroupedTile
    up: GroupedTile
    down: GroupedTile
    turned: GroupedTile

    @property
    def m(self) -> int:
        return self.down.m


# Most rows of an expert, on average: its tiles.
TILES: dict[int, Tiles] = {
    1: Tiles(
        GroupedTile(16, 64, 64, 4, 6, swap=True),
        GroupedTile(16, 64, 128, 4, 4, swap=True),
        GroupedTile(16, 64, 128, 4, 4, swap=True),
        GroupedTile(16, 64, 64, 4, 4),
    ),
    12: Tiles(
        GroupedTile(16, 64, 128, 4, 3, swap=True),
        GroupedTile(16, 128, 128, 4, 3, swap=True),
        GroupedTile(16, 128, 128, 4, 3, swap=True),
        GroupedTile(16, 64, 64, 4, 4),
    ),
    96: Tiles(
        GroupedTile(64, 64, 64, 4, 4),
        GroupedTile(64, 128, 64, 4, 4),
        GroupedTile(64, 128, 64, 4, 4),
        GroupedTile(64, 128, 64, 4, 4),
    ),
    1 << 31: Tiles(
        GroupedTile(128, 128, 64, 8, 4),
        GroupedTile(128, 256, 64, 8, 4),
        GroupedTile(128, 256, 64, 8, 4),
        GroupedTile(128, 256, 64, 8, 3),
    ),
}
OUTER = GradTile(128, 256, 64, 8, 4)
REFERENCE = GroupedTile(128, 128, 64, 8, 3)


def choose_tiles(num_rows: int, num_experts: int) -> Tiles:
    """Choose by how many of `num_rows` rows an expert has on average."""
    average = -(-num_rows // num_experts)
    return next(tiles for most, tiles in TILES.items() if average <= most)
