"""What a run says of the tokens that it compared, and of those that it did not."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.report.compared_tokens import closing_text, mismatch_text, percent
from spmd_rl.report.live_view import _mismatch
from spmd_rl.report.plain_view import step_line
from spmd_rl.report.progress import RunProgress
from spmd_rl.train.on_policy import on_policy_metrics


def step(compared: float, drawn: float, mismatched: float = 0.0) -> dict[str, float]:
    """Return what the trainer measures of a step, from its sums."""
    sums = {
        "onpolicy/compared_tokens": compared,
        "onpolicy/mismatched_tokens": mismatched,
        "onpolicy/drawn_tokens": drawn,
    }
    return on_policy_metrics(sums, 0.0, compares_bits=True)


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (step(512, 512), "mismatched 0 of 512"),
        (step(512, 5120, 3), "mismatched 3 of 512 (10 % compared)"),
        (step(0, 5120), "none compared"),
        (step(0, 0), ""),
        ({}, ""),
        # of an earlier version of this package
        ({"onpolicy/mismatched_tokens": 0, "onpolicy/compared_tokens": 9}, "mismatched 0 of 9"),
        ({"onpolicy/mismatched_tokens": 0, "onpolicy/compared_tokens": 0}, ""),
    ],
)
def test_a_line_says_what_share_was_compared(metrics: dict[str, float], text: str) -> None:
    assert mismatch_text(metrics) == text
    progress = RunProgress(3)
    progress.record_step(1, metrics)
    middle = f"  {text}" if text else ""
    assert step_line(progress).startswith(f"step 1/3{middle}  ETA ")


def test_the_share_is_of_what_engines_drew() -> None:
    assert step(1539, 5130)["onpolicy/compared_share"] == 0.3
    assert step(0, 5130)["onpolicy/compared_share"] == 0
    assert "onpolicy/compared_share" not in step(0, 0)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([step(9, 9), step(7, 7)], ""),
        ([{"train/loss": 1.0}], ""),
        ([step(9, 9), {"eval/reward": 1.0}, step(0, 9)], "9 of 18 tokens (50 %) were compared"),
        ([step(0, 9), step(0, 1000)], "no token was compared with the engine's log-probs: none of"),
        ([{"onpolicy/compared_tokens": 0, "onpolicy/mismatched_tokens": 0}], ""),
    ],
)
def test_the_end_of_a_run_says_so(rows: list[dict[str, Any]], said: str) -> None:
    found = closing_text(rows)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_the_live_view_says_the_share_of_the_run() -> None:
    progress = RunProgress(3)
    progress.record_step(1, step(1539, 1539))
    assert "compared" not in str(_mismatch(progress))
    progress.record_step(2, step(0, 13851))
    text = str(_mismatch(progress))
    assert text.startswith("0 of 1,539 tokens (10 % of the engine's are compared)")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.001, "under 1 %"), (0.999, "over 99 %"), (0.314, "31 %")],
)
def test_a_part_is_never_shown_as_all_or_nothing(share: float, text: str) -> None:
    assert percent(share) == text
