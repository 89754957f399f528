"""What a hook is told, what it tells, and the choice of groups."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import HookContext, Keep
from spmd_rl.hooks.controller_hooks import KeepGroup
from spmd_rl.types.groups import Group
from tests.unit.hooks.cases import make_prompt, make_sample


def test_random_numbers_depend_on_seed_prompt_and_sample_alone() -> None:
    def draw(**fields: int) -> float:
        return float(HookContext(**fields).rng.random())  # type: ignore[arg-type]

    base = {"seed": 1, "prompt_uid": 2, "sample_index": 3}
    assert draw(**base) == draw(**base, step=9, version=8)
    others = [draw(**{**base, name: 7}) for name in base]
    assert len({draw(**base), *others}) == 4
    context = HookContext()
    assert context.rng is context.rng, "one stream, not the first number again and again"


def test_a_context_is_frozen_and_records_what_is_emitted() -> None:
    context = HookContext()
    context.emit("x", 1)
    context.emit("x", 2)
    assert context.metrics == {"x": 2.0}
    with pytest.raises(ValueError, match="expected a finite number"):
        context.emit("y", math.inf)
    context.note("judge", "x" * 2000)
    context.note("judge", "y" * 2000 + "\ud800")
    assert context.notes == {"judge": "y" * 1000}
    with pytest.raises(FrozenInstanceError):
        context.step = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"processes": 0}, "processes = 0: expected 1 or more"),
        ({"concurrency": 0}, "concurrency = 0: expected 1 or more"),
        ({"deadline_s": -1.0}, "deadline_s = -1.0: expected 0 .none. or more, and finite"),
        ({"episode_deadline_s": math.inf}, "episode_deadline_s = inf: expected 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HookConfig(**settings)  # type: ignore[arg-type]


KEEPS = """
from spmd_rl.hooks.context import Keep

def keep(ctx, group):
    if ctx.config["how"] == "raise":
        raise KeyError("gold")
    if ctx.config["how"] == "bool":
        return True
    return Keep(ctx.step == 5 and ctx.version == 0, "too early")
"""


def test_keep_group_says_yes_or_no(tmp_path: Path) -> None:
    file = tmp_path / "keeps.py"
    file.write_text(KEEPS)
    group = Group(make_prompt(), [make_sample(index=0), make_sample(index=1)])
    keep = KeepGroup(f"{file}:keep", {"how": "say"})
    assert keep(group) == Keep(False, "too early")
    keep.step = 5
    assert keep(Group(make_prompt(), group.samples * 2)) == Keep(True, "too early")


@pytest.mark.parametrize(
    ("how", "problem"),
    [("raise", r"raised KeyError: 'gold' \(at keeps.py:6\)"), ("bool", "returned no Keep: True")],
)
def test_a_keep_group_that_fails_names_the_group(tmp_path: Path, how: str, problem: str) -> None:
    file = tmp_path / "keeps.py"
    file.write_text(KEEPS)
    keep = KeepGroup(f"{file}:keep", {"how": how})
    with pytest.raises(DataError, match=rf"keep_group keep on prompt 7 \('37\+48='\): {problem}"):
        keep(Group(make_prompt(), []))


def test_a_context_takes_only_so_many_names_and_so_large_numbers() -> None:
    context = HookContext()
    for number in range(1000):
        context.emit(f"value {number}", number)
    for number in range(100):
        context.note(f"note {number}", "x" * 5000)
    context.emit("value 0", 1.0)
    context.note("note 0", "again")
    with pytest.raises(ValueError, match="there are 1000 names for this sample already"):
        context.emit("more", 1.0)
    with pytest.raises(ValueError, match="there are 100 names for this sample already"):
        context.note("more", "x")
    with pytest.raises(ValueError, match="at most 1e\\+15 in size"):
        context.emit("value 0", 1e16)
    assert max(map(len, context.notes.values())) == 1000
