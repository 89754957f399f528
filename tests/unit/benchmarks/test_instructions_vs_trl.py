"""The comparison of a whole run with TRL: what the rows of two curves say."""

from __future__ import annotations

from benchmarks.instructions_vs_trl import Curve, rows_of


def curve(side: str, seconds: float, rewards: dict[str, float], steps: int) -> Curve:
    done = [{"seconds": seconds, "tokens": 10, "reward": 0.5}] * steps
    return {"side": side, "seed": 0, "steps": done, "held_out": rewards}


OURS = curve("ours", 2.0, {"0": 0.3, "10": 0.7, "20": 0.95}, 20)


def test_only_equal_steps_are_compared() -> None:
    rows = {row.what: row for row in rows_of([OURS, curve("trl", 4.0, {"0": 0.25, "10": 0.5}, 10)])}
    after = "seed 0: held-out reward after {} steps"
    assert rows[after.format(10)].peer_value == 0.5
    assert rows[after.format(20)].peer is None
    assert rows["seed 0: time to a held-out reward of 0.9"].value == 40
    assert rows["step, median"].ratio == 0.5
    assert rows["seed 0: steps"].peer_value == 10


def test_a_side_without_the_other_has_rows() -> None:
    whats = [row.what for row in rows_of([curve("trl", 4.0, {"0": 0.0, "10": 0.95}, 10)])]
    assert "seed 0: time to a held-out reward of 0.9, TRL with transformers" in whats
    assert "step, median, TRL with transformers" in whats
