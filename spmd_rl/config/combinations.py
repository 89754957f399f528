"""Settings that do not go together, as rows that checks read and `spmd-rl plan --combinations`
lists.

    Combination({"lora.rank": ON, "freeze": ON}, "{1}: expected () with lora.rank")

refuses a config with both settings. The sentence has the settings by number, as `key = value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.errors import ConfigError, SpmdError

ROLE = "split.train."  # stands in keys for the split of any trainer
Test = Callable[[Any, Callable[[str], Any]], bool]  # of a value, and a look-up of others


class _Absent:
    """The value of a setting that a check is not given: it meets no condition."""

    def __format__(self, _: str) -> str:
        return "X"

    __repr__ = __str__ = lambda self: format(self)


ABSENT = _Absent()


@dataclass(frozen=True)
class Condition:
    """What a setting is in a row: in words, and as a test of its value."""

    text: str
    holds: Test
    value: Any = ABSENT  # the only one that meets it, if there is one


@dataclass(frozen=True)
class Setting:
    """A setting in a sentence: `{0}` is its key and value, `{0.key}` and `{0.value}` are each."""

    key: str
    value: Any = ABSENT

    def __str__(self) -> str:
        return self.key if self.value is ABSENT else f"{self.key} = {self.value!r}"


@dataclass(frozen=True)
class Combination:
    """Settings that do not go together where all conditions hold, and what a run then says."""

    when: Mapping[str, Condition]
    sentence: str
    error: type[SpmdError] = ConfigError

    def holds(self, settings: Any) -> bool:
        """Return whether `settings`, a config or tables of them by name, has all conditions."""

        def look_up(key: str) -> Any:
            return value_at(settings, key)

        for key, condition in self.when.items():
            value = look_up(key)
            if value is ABSENT or not condition.holds(value, look_up):
                return False
        return True

    def words(self, settings: Any, role: str = "train") -> str:
        """Return the sentence for `settings`; `role` is the name of the trainer's ranks."""
        named = [
            Setting(key.replace(ROLE, f"split.{role}."), value_at(settings, key))
            for key in self.when
        ]
        return self.sentence.format(*named)

    def words_of_any(self) -> str:
        """Return the sentence with the values alone that the row says; X stands for others."""
        named = [Setting(key, condition.value) for key, condition in self.when.items()]
        return self.sentence.format(*named)


def refuse(rows: Iterable[Combination], settings: Any, role: str = "train") -> None:
    """Raise the error of the first row that holds of a config, or of tables by their names."""
    for row in rows:
        if row.holds(settings):
            raise row.error(row.words(settings, role))


def value_at(settings: Any, key: str) -> Any:
    """Return the setting at a dotted key, ABSENT where there is none."""
    if isinstance(settings, dict) and key in settings:
        return settings[key]
    for name in key.split("."):
        is_table = isinstance(settings, dict)
        settings = settings.get(name, ABSENT) if is_table else getattr(settings, name, ABSENT)
    return settings


ANY = Condition("as it is", lambda value, _: True)
ON = Condition("set", lambda value, _: bool(value))
OFF = Condition("not set", lambda value, _: not value)


def equal(*values: Any) -> Condition:
    """The setting has one of these values."""
    only = values[0] if len(values) == 1 else ABSENT
    return Condition(f"= {_listed(values)}", lambda value, _: value in values, only)


def other_than(*values: Any) -> Condition:
    """The setting has none of these values."""
    return Condition(f"other than {_listed(values)}", lambda value, _: value not in values)


def above(least: float) -> Condition:
    """The setting is a number above this one."""
    return Condition(f"above {least}", lambda value, _: value > least)


def compared(text: str, key: str, holds: Callable[[Any, Any], bool]) -> Condition:
    """The setting compares so with that of another key, such as "less than" and `operator.lt`."""

    def test(value: Any, look_up: Callable[[str], Any]) -> bool:
        other = look_up(key)
        return other is not ABSENT and holds(value, other)

    return Condition(f"{text} {key}", test)


def _listed(values: Iterable[Any]) -> str:
    return " or ".join(map(repr, values))
