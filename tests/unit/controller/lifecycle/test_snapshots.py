"""Snapshots of all ranks, as they are saved beside a run."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.controller.channel.wire import Stacks
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.snapshots import Snapshots


def test_stacks_are_saved_with_what_is_missing(tmp_path: Path) -> None:
    snapshots = Snapshots(Roster(2, 20.0))
    snapshots.store(0, Stacks("a.py:1 in f", "thread main", {"replayed": 2}), b"{}")
    assert snapshots.has(0)
    assert not snapshots.has(1)
    assert (
        snapshots.save(tmp_path / "stacks")
        == f"the stacks of all ranks are in {tmp_path / 'stacks'}"
    )
    assert (tmp_path / "stacks/rank_0.txt").read_text() == "2 frames refused: replayed\nthread main"
    assert (tmp_path / "stacks/rank_0.collectives.json").read_text() == "{}"
    assert "no answer" in (tmp_path / "stacks/rank_1.txt").read_text()
    assert "in save" in (tmp_path / "stacks/controller.txt").read_text()
    assert snapshots.location(0) == "at a.py:1 in f"
    assert snapshots.location(1) == "which does not answer"


def test_a_disk_that_takes_nothing_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    assert "could not be saved" in Snapshots(Roster(1, 20.0)).save(tmp_path / "stacks")
