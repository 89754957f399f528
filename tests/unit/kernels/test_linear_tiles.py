"""The tables of tiles and rings: every ring fits a multiprocessor, and who has a ring has a tile too."""

from __future__ import annotations

import pytest

from spmd_rl.kernels.linear_tiles import GATED_RINGS, PART, RINGS, Ring, choose_gated_tile, choose_ring, takes_ring

SHARED_BYTES = 227 << 10
WGMMA_ROWS = 64


@pytest.mark.parametrize(("table", "halves"), [(RINGS, 1), (GATED_RINGS, 2)])
def test_every_ring_fits_shared_memory(table: dict[int, tuple[tuple[int, Ring], ...]], halves: int) -> None:
    for rows, row in table.items():
        for _, ring in row:
            behind = max(0, WGMMA_ROWS - ring.n) * PART * 2  # what a low tile's operand reads behind the last one
            stages = ring.stages * (ring.k * (ring.m + halves * ring.n) * 2 + 8)
            assert stages + behind <= SHARED_BYTES, ring
            assert ring.k % PART == 0 and ring.stages >= 2 and ring.m <= rows


def test_a_gated_ring_is_chosen_only_where_a_gated_tile_is() -> None:
    for m in (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256):
        for n in (1024, 3072, 4096, 9728, 12288, 40000):
            assert choose_ring(m, n, gated=True) is None or choose_gated_tile(m, n) is not None


def test_more_rows_than_the_last_bucket_have_no_ring() -> None:
    assert choose_ring(256, 1024) is not None
    assert choose_ring(257, 1024) is None
    assert choose_ring(128, 4096) is None


@pytest.mark.parametrize(
    ("n", "k", "gated", "takes"),
    [
        (4096, 1024, False, True),
        (4096, 1000, False, False),  # K in no whole parts
        (2560, 9728, False, False),  # 50 MB
        (3072, 1024, True, True),
        (9728, 1024, True, False),
        (151936, 4096, False, True),
    ],
)
def test_rings_are_for_small_weights_and_for_heads(n: int, k: int, gated: bool, takes: bool) -> None:
    assert takes_ring(n, k, gated) is takes
