"""Which settings of a config are not the defaults of their classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spmd_rl.config.defaults import changed_defaults
from spmd_rl.recipes.grpo import Config
from spmd_rl.train.config import TrainerConfig


@dataclass(frozen=True)
class One:
    kind: Literal["one"] = "one"
    size: int = 1


@dataclass(frozen=True)
class Two:
    kind: Literal["two"] = "two"
    size: int = 2


@dataclass(frozen=True)
class Outer:
    model: str
    engine: One | Two = field(default_factory=One)
    sizes: tuple[int, ...] = (1, 2)
    data: str | dict[str, float] = ""
    note: str | None = None


def test_settings_at_their_defaults_are_left_out() -> None:
    assert changed_defaults(Outer("m")) == {"model": None}
    assert changed_defaults(Outer("m", One(size=5), (3,))) == {
        "model": None,
        "engine.size": 1,
        "sizes": [1, 2],
    }


def test_another_class_is_compared_with_its_own_defaults() -> None:
    assert changed_defaults(Outer("m", Two())) == {"model": None, "engine.kind": "one"}


def test_the_entries_of_a_table_have_no_default() -> None:
    assert changed_defaults(Outer("m", data={"a.jsonl": 1.0})) == {
        "model": None,
        "data.a.jsonl": None,
    }


def test_a_recipe_names_what_was_set() -> None:
    cfg = Config(model="m", data="d", reward="r", trainer=TrainerConfig(lr=2e-3, betas=(0.9, 0.99)))
    changed = changed_defaults(cfg)
    assert changed["trainer.lr"] == 1e-6
    assert changed["trainer.betas"] == [0.9, 0.999]
    assert "trainer.eps" not in changed
    assert "run.seed" not in changed
