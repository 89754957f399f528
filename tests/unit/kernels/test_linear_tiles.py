"""Tables of tiles and rings: every ring fits a multiprocessor and has a tile beside it."""

from __future__ import annotations

import pytest

from spmd_rl.kernels.linear.tiles import (
    GATED_RINGS,
    PART,
    RINGS,
    RINGS_OF,
    SHARED_ROWS,
    Ring,
    Share,
    choose_gated_tile,
    choose_ring,
    choose_share,
)

SHARED_BYTES = 227 << 10
WGMMA_ROWS = 64
ROWS = (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256)


def shared_bytes(ring: Ring, halves: int) -> int:
    # what a low tile's operand reads behind the last one
    behind = max(0, WGMMA_ROWS - ring.n) * PART * 2
    return ring.stages * (ring.k * (ring.m + halves * ring.n) * 2 + 8) + behind


@pytest.mark.parametrize(("table", "halves"), [(RINGS, 1), (GATED_RINGS, 2)])
def test_every_ring_fits_shared_memory(
    table: dict[int, tuple[tuple[int, Ring], ...]], halves: int
) -> None:
    for rows, row in table.items():
        for _, ring in row:
            assert shared_bytes(ring, halves) <= SHARED_BYTES, ring
            assert ring.k % PART == 0 and ring.stages >= 2 and ring.m <= max(rows, 16)


def test_exact_shapes_have_rings_of_their_own() -> None:
    for (bucket, n, k), ring in RINGS_OF.items():
        assert bucket in RINGS and shared_bytes(ring, 1) <= SHARED_BYTES
        assert choose_ring(bucket, n, k) is ring
        assert choose_ring(bucket, n, k + PART) != ring and choose_ring(bucket + 1, n, k) != ring


def test_a_gated_ring_is_chosen_only_where_a_gated_tile_is() -> None:
    for m in ROWS:
        for n in (1024, 3072, 4096, 9728, 12288, 40000):
            assert (
                choose_ring(m, n, 4096, gated=True) is None or choose_gated_tile(m, n) is not None
            )


def test_more_rows_than_the_last_bucket_have_no_ring() -> None:
    assert choose_ring(256, 1024, 1024) is not None
    assert choose_ring(257, 1024, 1024) is None
    assert choose_ring(128, 4096, 1024) is None


def test_large_weights_and_k_in_no_whole_parts_have_no_ring() -> None:
    assert choose_ring(16, 4096, 1024) is not None
    assert (
        choose_ring(16, 4096, 1000)
        is choose_ring(16, 4096, 4096)
        is choose_ring(16, 3072, 4096, True)
        is None
    )
    assert choose_ring(16, 151936, 4096) is not None


LARGE = (
    (2560, 9728),
    (4096, 4096),
    (4096, 12288),
    (6144, 2560),
    (9728, 2560),
    (12288, 4096),
    (24576, 4096),
    (10240, 5120),
    (25600, 5120),
    (5120, 25600),
    *((n, 5120) for n in range(1024, 32769, 1000)),
)


@pytest.mark.parametrize("halves", [1, 2])
def test_shares_cover_a_product_with_a_block_at_most_for_each_multiprocessor(halves: int) -> None:
    found = [(m, n, choose_share(m, n, k, halves == 2)) for m in SHARED_ROWS for n, k in LARGE]
    assert sum(share is not None for *_, share in found) > 100
    for m, n, share in found:
        if share is not None:
            high = -(-((halves - 1) * share.padded + share.n) // WGMMA_ROWS) * WGMMA_ROWS
            assert -(-m // share.m) <= share.blocks and share.n <= n <= share.n * share.most_shares
            assert (
                share.stages * (share.k * (share.m + halves * share.padded) * 2 + 16) + 1024
                <= SHARED_BYTES
            )
            results = share.m * (share.n + 8) if share.swap else (high + 8) * share.m
            # are turned over in the ring
            assert results * 2 <= share.stages * share.k * share.padded * halves * 2
            # of the last tile, where its operand is taller
            behind = (high - halves * share.padded) * PART
            assert behind <= share.stages * share.k * share.m
            assert share.stages >= 3 and 0 < share.early < share.stages
            assert share.m % 8 == 0 and share.n % (4 if share.n < WGMMA_ROWS else 8) == 0
            assert not share.swap or (share.m % WGMMA_ROWS == share.n % 8 == 0 and halves == 1)


def test_x_comes_first_where_a_block_has_few_rows_of_the_weight_and_many_of_x() -> None:
    assert choose_share(256, 2560, 9728) == Share(64, 80, 64, 12, 6, 4, swap=True)
    assert choose_share(128, 2560, 9728) == Share(64, 40, 128, 8, 4, 2, swap=True)
    assert choose_share(256, 4096, 12288) == Share(128, 64, 64, 9, 5, 2)


def test_half_of_a_ring_is_asked_for_early_rounded_up_for_long_products() -> None:
    assert choose_share(64, 4096, 4096) == Share(32, 64, 128, 9, 5, 2)
    assert choose_share(64, 4096, 1024) == Share(32, 64, 128, 9, 4, 2)
    assert choose_share(64, 6144, 4096) == Share(64, 48, 128, 8, 4, 1)


def test_small_weights_and_heads_have_no_share() -> None:
    assert choose_share(64, 2560, 9728) == Share(32, 40, 128, 12, 6, 2)
    assert (
        choose_share(1, 4096, 4096) == choose_share(8, 4096, 4096) == Share(8, 32, 128, 22, 11, 1)
    )
    for m, n, k in (
        (257, 2560, 9728),
        (65, 6144, 4096),
        (32, 4096, 1024),
        (64, 151936, 4096),
        (64, 1024, 3072),
    ):
        assert choose_share(m, n, k) is None
    assert choose_share(64, 4096, 1024) is not None
    assert choose_share(32, 2560, 4096) is not None and choose_share(65, 2560, 4096) is None
    assert choose_share(64, 2560, 9720) is choose_share(64, 4100, 4096) is None
