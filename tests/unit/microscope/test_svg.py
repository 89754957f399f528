"""The pictures, as SVG text."""

from __future__ import annotations

import re
from typing import Any

from spmd_rl.microscope.page.svg import MAX_STRIPS, network_map, strips

SEQUENCES: list[dict[str, Any]] = [
    {"name": f"{n}:0", "prompt_tokens": 6, "response_tokens": 4} for n in range(MAX_STRIPS + 6)
]


def rects(picture: str, status: str) -> list[tuple[float, float]]:
    """Top and height of each."""
    found = re.findall(
        rf'y="([0-9.]+)" width="[0-9.]+" height="([0-9.]+)" rx="2" class="{status}"', picture
    )
    return [(float(y), float(height)) for y, height in found]


def test_sequences_that_differ_come_first_and_no_others_are_passed_over_in_silence() -> None:
    picture = strips({SEQUENCES[-1]["name"]: [2, 7]}, SEQUENCES)
    names = re.findall(r">(\d+:0)<", picture)
    assert names[:2] == [SEQUENCES[-1]["name"], "0:0"]
    assert len(names) == MAX_STRIPS
    assert "6 more not shown, 0 of them differ" in picture
    every = strips({one["name"]: [1] for one in SEQUENCES}, SEQUENCES)
    assert "6 more not shown, 6 of them differ" in every
    assert "not shown" not in strips({}, SEQUENCES[:MAX_STRIPS])


def test_where_a_response_begins_is_seen_where_all_rows_differ() -> None:
    picture = strips({"0:0": list(range(10))}, SEQUENCES[:1])
    heights = [height for _, height in rects(picture, "introduced")]
    assert heights == [12] * 6 + [6] * 4
    assert [height for _, height in rects(picture, "unseen")] == [12, 6]


def test_a_cell_is_named_as_its_point() -> None:
    found = [
        {
            "layer": layer,
            "op": op,
            "status": "equal",
            "rows": 3,
            "unequal_rows": 0,
            "introduced_rows": 0,
        }
        for layer, op in ((-1, "embed"), (0, "q"), (1, "logits"))
    ]
    titles = re.findall(r"<title>([^:]+):", network_map(found))
    assert titles == ["embed", "layer 0 q", "logits"]
