"""Two ranks of GRPO, of which one is killed in each phase: benchmarks/rank_kills.py on CPUs.

How long such a run takes to end is a bar of the benchmark on GPUs, and of no test.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from benchmarks.rank_kills import Killed, campaign, rows_of
from benchmarks.rank_kills_recipe import PLACES, Config
from tests.system.kill_resume import Outcome


@pytest.mark.system
def test_a_rank_killed_in_any_phase_is_named_and_changes_no_bit(tmp_path: Path) -> None:
    whole, killed = campaign(tmp_path, 2, list(PLACES), num_jobs=2)
    assert {one.rank for one in killed} == {0, 1}
    rows = [row for row in rows_of(2, whole, killed) if row.unit != "s"]
    assert [(row.value, row.holds) for row in rows] == [(len(PLACES), True)] * 4


@pytest.mark.parametrize("phase", PLACES)
def test_there_is_a_place_to_die_in_each_phase(phase: str) -> None:
    module, name = PLACES[phase]
    assert callable(attrgetter(name)(importlib.import_module(module)))
    assert {*get_args(get_type_hints(Config)["dies_in"])} == {"", *PLACES}


WHOLE = Outcome("7f", [{"train/loss": 1.0}], {"step_00001.jsonl": "a0"})
GOOD = Killed("train", 1, 1, 2.5, "lost rank 1 (host h, pid 9), last heard 1 s ago", WHOLE)


@pytest.mark.parametrize(
    ("killed", "missed"),
    [
        (GOOD, []),
        (replace(GOOD, sentence="rank 1 was killed by SIGKILL"), []),
        (replace(GOOD, seconds=10.5), ["until the run ended"]),
        (replace(GOOD, code=0), ["names the rank"]),
        (replace(GOOD, sentence="lost rank 10 (host h, pid 9)"), ["names the rank"]),
        (replace(GOOD, sentence="no answer from rank 1"), ["names the rank"]),
        (replace(GOOD, outcome=replace(WHOLE, weights="7e")), ["final weights", "metrics"]),
        (replace(GOOD, outcome=replace(WHOLE, metrics=[{"train/loss": 2.0}])), ["metrics"]),
        (replace(GOOD, outcome=None), ["goes on with", "final weights", "metrics"]),
    ],
)
def test_what_is_wrong_is_seen(killed: Killed, missed: list[str]) -> None:
    found = [row.what for row in rows_of(2, WHOLE, [killed]) if not row.holds]
    assert len(found) == len(missed)
    assert all(part in what for part, what in zip(missed, found, strict=True))
