"""The sizes in which decoding steps are recorded."""

from __future__ import annotations

from spmd_rl.rollout.native.graphs import batch_sizes, table_width


def test_sizes_end_at_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


def test_page_tables_hold_whole_splits() -> None:
    assert table_width(num_pages=3, max_pages=70, split_pages=0) == 70
    widths = [table_width(num_pages, max_pages=70, split_pages=16) for num_pages in (1, 16, 17, 32, 33, 64, 65, 70)]
    assert widths == [16, 16, 32, 32, 64, 64, 80, 80]
