"""Short names of graders, and the last box that a grader may read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.load import load_function
from spmd_rl.hooks.signatures import load_reward, reward_weights
from spmd_rl.rewards import names
from spmd_rl.rewards.answers import match
from spmd_rl.rewards.answers.boxed import last_boxed
from tests.unit.rewards.cases import ask, say


@pytest.mark.parametrize("name", names.GRADERS)
def test_every_short_name_is_the_function_that_the_table_says(name: str) -> None:
    loaded = load_reward(name)
    assert loaded.function is load_function("reward", names.GRADERS[name])
    assert loaded.name == load_reward(names.GRADERS[name]).name == name
    assert not loaded.form.whole_group


def test_the_page_has_every_short_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    boxed = [f"boxed_{name}" for name in names.TEXT]
    assert [name for name in [*names.GRADERS, *boxed] if f"`{name}`" not in page] == []


@pytest.mark.parametrize("inner", names.TEXT)
def test_a_boxed_grader_is_called_as_the_one_in_it(inner: str) -> None:
    boxed = load_reward(f"boxed_{inner}")
    assert boxed.form == load_reward(inner).form
    assert boxed.name == f"boxed_{inner}"


def test_a_boxed_grader_reads_the_last_box_only() -> None:
    boxed = load_reward("boxed_exact").function
    assert boxed(ask("85"), say(r"\boxed{84}, no: \boxed{ 85 } is it")) == 1
    assert boxed(ask("85"), say("85")) == 0
    assert boxed(ask("85"), say(r"\boxed{85")) == 0


@pytest.mark.parametrize("name", ["maths", "boxed_dapo", "boxed_", "boxed_boxed_exact", "Math"])
def test_an_unknown_short_name_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="no grader of this name .*last_number, math, boxed_math"):
        load_reward(name)


def test_a_missing_package_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"'math': it needs the package math_verify: pip install"):
        load_reward("math")
    assert load_reward("exact").function is match.exact


def test_other_hooks_have_no_short_names() -> None:
    with pytest.raises(ConfigError, match="write it as package.module:function"):
        load_function("hooks.keep_group", "math")


def test_tables_take_short_names() -> None:
    assert reward_weights({"math": 1.0, "f1": 0.5}) == {"math": 1.0, "f1": 0.5}


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{a{b{c}d}e} tail }", "a{b{c}d}e"),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{ and then \boxed{2}", "2"),
        (r"\boxed {1}", "1"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed 5", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


def _braced(parts: list[str]) -> str:
    return "".join("{" + part + "}" for part in parts)


_nested: Any = st.recursive(
    st.text("ab1 ", max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(_braced),
    max_leaves=8,
)


@given(_nested, st.text("xy {}\\", max_size=20))
def test_a_box_ends_where_its_braces_do(content: str, after: str) -> None:
    assert last_boxed(rf"\boxed{{9}} so \boxed{{{content}}}{after}") == content


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("math", "math"),
        ("spmd_rl.rewards.answers.math:math", "math"),
        ("spmd_rl.rewards.answers.math:agrees", "spmd_rl.rewards.answers.math:agrees"),
        ("boxed_exact", "boxed_exact"),
        ("rules.py:score", "rules.py:score"),
        ("./rules.py:score", "rules.py:score"),
        ("a/../rules.py:score", "rules.py:score"),
        ("{here}/rules.py:score", "rules.py:score"),
        ("{here}/a/rules.py:score", "a/rules.py:score"),
        ("/elsewhere/rules.py:score", "/elsewhere/rules.py:score"),
        ("../rules.py:score", "../rules.py:score"),
        ("package.module:score", "package.module:score"),
        ("", ""),
    ],
)
def test_a_function_has_one_name(name: str, canonical: str) -> None:
    assert names.canonical_name(name.format(here=Path.cwd())) == canonical
    assert names.canonical_name(canonical) == canonical


@pytest.mark.parametrize("short", names.GRADERS)
def test_the_full_name_of_a_grader_is_its_short_one(short: str) -> None:
    assert reward_weights(names.GRADERS[short]) == reward_weights(short) == {short: 1.0}
