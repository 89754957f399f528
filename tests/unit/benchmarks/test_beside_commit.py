"""The comparison with an earlier commit: whose code runs, turns, and bars."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import beside_commit, laptop_vs_trl
from benchmarks.beside_commit import NOW, ROOT, THEN, Side


class FakePeer:
    """Answers each request as `reply` says, and notes it."""

    def __init__(self, reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.reply, self.asked = reply, list[dict[str, Any]]()

    def ask(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        return {"code": str(ROOT)} | self.reply(request)


def side(reply: Callable[[dict[str, Any]], dict[str, Any]]) -> Side:
    return Side(FakePeer(reply), ROOT, [], [])  # type: ignore[arg-type]


def steps_of(step_s: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return replies of an engine with such a decode step, after a prefill that takes a second."""
    return lambda asked: {
        "seconds": 1 + step_s * asked["new_tokens"],
        "cpu_s": 1 + 2 * step_s * asked["new_tokens"],
        "num_tokens": 100,
    }


def test_the_earlier_code_runs_beside_these_benchmarks(tmp_path: Path) -> None:
    for name in ("spmd_rl", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("earlier")
    headers = {"comment": "ab" * 20}
    with tarfile.open(tmp_path / "t.tar", "w", pax_headers=headers) as tar:
        for name in ("spmd_rl", "examples"):
            tar.add(tmp_path / name, name)
    (tmp_path / "run" / THEN).mkdir(parents=True)
    code, commit = beside_commit.roots(tmp_path / "t.tar", tmp_path / "run")
    assert commit == "ab" * 20
    assert code[NOW] == ROOT
    assert (code[THEN] / "spmd_rl/file.py").read_text() == "earlier"
    assert (code[THEN] / "benchmarks/beside_recipe.py").is_file()
    assert not beside_commit.compares_pushes(code[THEN])
    assert beside_commit.compares_pushes(ROOT)


def test_an_answer_of_other_code_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the code of /elsewhere answered"):
        side(lambda asked: {"code": "/elsewhere"}).ask(seed=1)


def test_sides_take_turns_in_changing_order_after_a_warm_up() -> None:
    order: list[tuple[str, int]] = []
    sides = {name: side(lambda asked: {}) for name in (NOW, THEN)}
    names = {id(one): name for name, one in sides.items()}

    def turn(one: Side, number: int) -> None:
        order.append((names[id(one)], number))
        one.wall_s.append(number)

    beside_commit.take_turns(sides, 2, turn)
    assert order == [(THEN, 0), (NOW, 0), (NOW, 1), (THEN, 1), (THEN, 2), (NOW, 2)]
    assert [one.wall_s for one in sides.values()] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(("now_s", "holds"), [(0.00101, True), (0.00103, False)])
def test_a_decode_step_is_free_of_prefill(now_s: float, holds: bool) -> None:
    sides = {NOW: side(steps_of(now_s)), THEN: side(steps_of(0.001))}
    rows = list(beside_commit.decode(beside_commit.ON_CPU, sides, 1))
    step, _, processor = rows[:3]
    assert (step.value, step.peer_value) == (pytest.approx(1e3 * now_s), pytest.approx(1.0))
    assert processor.value == pytest.approx(2e3 * now_s)
    assert [row.holds for row in rows] == [holds, None, None] * len(beside_commit.ON_CPU.decode)


def test_an_earlier_benchmark_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "benchmarks/grpo_step/ours.py"
    file.parent.mkdir(parents=True)
    file.write_text('{"a": stats["onpolicy/mismatched_tokens"], "b": stats["train/loss"]}')
    laptop_vs_trl.mend(tmp_path)
    expected = '{"a": stats.get("onpolicy/mismatched_tokens", 0.0), "b": stats["train/loss"]}'
    assert file.read_text() == expected
