"""The API reference can show every public name."""

from __future__ import annotations

import inspect

import spmd_rl
from docs.build_api import public_classes, settings_table
from tests.laws.source import ROOT


def undescribed(classes: list[type]) -> list[str]:
    """Classes without a docstring of their own; an error's name may say enough."""
    named = {found.__name__: found for found in classes if not issubclass(found, Exception)}
    return [name for name, found in named.items() if not found.__dict__.get("__doc__")]


def test_every_public_class_is_described() -> None:
    assert len([*public_classes()]) > 15
    assert undescribed([*public_classes()]) == []


def test_every_public_function_is_described() -> None:
    values = {name: getattr(spmd_rl, name) for name in spmd_rl.__all__}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    assert len(functions) > 8
    assert [name for name, value in functions.items() if not value.__doc__] == []


def test_the_names_are_few_and_an_installation_has_their_stub() -> None:
    assert len(spmd_rl.__all__) <= 80
    assert '"spmd_rl": ["py.typed", "*.pyi"]' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_settings_have_their_comments() -> None:
    table = settings_table(spmd_rl.RunConfig)
    assert "| `save_every` | `20` | steps between checkpoints" in table


def test_a_class_without_a_docstring_is_seen() -> None:
    class Bare:
        pass

    class Described:
        """A class with a docstring."""

    assert undescribed([Bare, Described]) == ["Bare"]
