"""Page of all settings of the shipped recipes, from their configs.

    python -m docs.build_settings       # writes docs/settings.md

What several recipes have is listed once, table by table, and then what each recipe adds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.cli.help import shipped
from spmd_rl.config.describe import Key, describe
from spmd_rl.config.first import first_groups
from spmd_rl.controller.run.recipe import load_recipe

PAGE = Path(__file__).parent / "settings.md"
TOP = "Top level"
HEAD = """\
# Settings

`python -m docs.build_settings` writes this page from the configs of the recipes. A setting is said
as `--trainer.lr=1e-6` on a command line, or in a TOML file (`--config FILE`) in a table, as
`lr = 1e-6` below `[trainer]`.

`spmd-rl run RECIPE --help` shows the settings that people change first, which are **bold** here.
`--help-all` lists all settings of a recipe with their types. [Algorithms](algorithms.md),
[data](data.md), [rewards](rewards.md), [hooks](hooks.md) and
[evaluations](watching.md#evaluations) say more about theirs.

Names in italics before a meaning are those of recipes, where some recipes with the same table lack
the setting. Recipes that extend [`grpo`](#grpo) have what it has. A word in brackets, such as
[sglang], is the `kind` of engine or backend that has the setting.

## Settings of several recipes
"""
_QUOTED = re.compile(r"'[^']*'")
_PAGE_NAME = re.compile(r"docs/([\w-]+)\.md")


@dataclass(frozen=True)
class Listed:
    """The settings of one recipe. `base` is the recipe whose config its own config extends."""

    name: str
    summary: str
    config: type
    base: str
    keys: tuple[Key, ...]
    first: frozenset[str]


Identity = tuple[str, str]  # name and meaning of a setting: its default may be another elsewhere


def identity(key: Key) -> Identity:
    return key.name, key.doc


def table_of(key: Key) -> str:
    """Return the table of a setting, `TOP` where it is in none."""
    table, dot, _ = key.name.partition(".")
    return table if dot else TOP


def listed_recipes() -> dict[str, Listed]:
    """Return the shipped recipes by name."""
    configs = {name: load_recipe(name).config for name in shipped()}
    names = {config: name for name, config in configs.items()}
    return {
        name: Listed(
            name,
            summary,
            configs[name],
            next((names[cls] for cls in configs[name].__mro__[1:] if cls in names), ""),
            tuple(describe(configs[name])),
            frozenset(k.name for keys in first_groups(configs[name]).values() for k in keys),
        )
        for name, summary in shipped().items()
    }


class SettingsPage:
    """The page's text, from the recipes. A recipe introduces the settings that its base lacks."""

    def __init__(self, recipes: dict[str, Listed]) -> None:
        self._recipes = recipes
        self._users: dict[Identity, list[str]] = {}  # the recipes that introduce a setting
        self._defaults: dict[Identity, str] = {}
        defaults: dict[Identity, Counter[str]] = {}
        for recipe in recipes.values():
            for key in self._introduced(recipe):
                users = self._users.setdefault(identity(key), [])
                if recipe.name not in users:
                    users.append(recipe.name)
                defaults.setdefault(identity(key), Counter())[key.default] += 1
        for name, found in defaults.items():
            self._defaults[name] = found.most_common(1)[0][0]
        self._shared = self._shared_tables()

    def text(self) -> str:
        """Return the whole page."""
        parts = [HEAD, *map(self._section_of_table, self._shared), "## What each recipe adds\n"]
        parts += map(self._section_of_recipe, self._recipes.values())
        return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"

    def _introduced(self, recipe: Listed) -> list[Key]:
        inherited = {identity(key) for key in self._base_keys(recipe)}
        return [key for key in recipe.keys if identity(key) not in inherited]

    def _base_keys(self, recipe: Listed) -> tuple[Key, ...]:
        return self._recipes[recipe.base].keys if recipe.base else ()

    def _shared_tables(self) -> dict[str, list[Key]]:
        """Return the settings that several recipes introduce, by their tables."""
        tables: dict[str, dict[Identity, Key]] = {TOP: {}}
        for recipe in self._recipes.values():
            for key in recipe.keys:
                if len(self._users.get(identity(key), ())) > 1:
                    tables.setdefault(table_of(key), {})[identity(key)] = key
        return {title: list(keys.values()) for title, keys in tables.items()}

    def _section_of_table(self, title: str) -> str:
        keys = self._shared[title]
        users = {name for key in keys for name in self._users[identity(key)]}
        everyone = {name for name, recipe in self._recipes.items() if not recipe.base}
        said = "All recipes have it." if users >= everyone else f"In {in_words(sorted(users))}."
        first = {name for recipe in self._recipes.values() for name in recipe.first}
        rows = [self._row(key, first, users) for key in keys]
        heading = title if title == TOP else f"`{title}`"
        return f"### {heading}\n\n" + ("" if title == TOP else f"{said}\n\n") + table(rows)

    def _row(self, key: Key, first: Iterable[str], users: set[str]) -> str:
        have = self._users[identity(key)]
        note = "" if set(have) >= users else f"*{', '.join(have)}*: "
        return row(key, self._defaults[identity(key)], key.name in first, note)

    def _section_of_recipe(self, recipe: Listed) -> str:
        shared = {identity(key) for keys in self._shared.values() for key in keys}
        own = [key for key in self._introduced(recipe) if identity(key) not in shared]
        alike = {table: other for table in tables_of(own) if (other := self._like(own, table))}
        rows = [
            row(key, key.default, key.name in recipe.first)
            for key in own
            if table_of(key) not in alike
        ]
        lines = [f"### `{recipe.name}`\n", f"{recipe.summary}\n", f"{self._has(recipe)}\n"]
        for name, other in alike.items():
            keys = [key for key in own if table_of(key) == name]
            changed = listed_defaults(self._unlike(keys, name, other))
            lines.append(f"`{name}` has the settings of [`{other}`](#{other}){changed}.\n")
        if changes := listed_defaults(self._other_defaults(recipe)):
            lines.append(f"Some defaults differ{changes}.\n")
        return "\n".join([*lines, table(rows)] if rows else lines)

    def _has(self, recipe: Listed) -> str:
        if recipe.base:
            return f"It has all settings of [`{recipe.base}`](#{recipe.base})."
        own = tables_of(recipe.keys)
        shared = [f"[`{name}`](#{name})" for name in self._shared if name in own]
        return f"It has the tables {in_words(shared)}."

    def _like(self, keys: list[Key], name: str) -> str:
        """Return the shared table that has the settings of a recipe's table; "" if none has."""
        mine = {(key.name.partition(".")[2], key.doc) for key in keys if table_of(key) == name}
        for title, shared in self._shared.items():
            if mine == {(key.name.partition(".")[2], key.doc) for key in shared}:
                return title
        return ""

    def _unlike(self, keys: list[Key], name: str, other: str) -> Iterator[Key]:
        """Yield the settings of a table whose default is not that of the table `other`."""
        for key in keys:
            theirs = other + key.name.removeprefix(name), key.doc
            if self._defaults[theirs] != key.default:
                yield key

    def _other_defaults(self, recipe: Listed) -> Iterator[Key]:
        """Yield the settings listed elsewhere whose default is another in this recipe."""
        bases = {identity(key): key.default for key in self._base_keys(recipe)}
        for key in recipe.keys:
            usual = bases.get(identity(key), self._defaults.get(identity(key), key.default))
            if usual != key.default:
                yield key


def tables_of(keys: Iterable[Key]) -> list[str]:
    return [*dict.fromkeys(table_of(key) for key in keys if table_of(key) != TOP)]


def listed_defaults(keys: Iterable[Key]) -> str:
    """Return the end of a sentence that lists settings with their defaults; "" without one."""
    texts = [f"`{key.name}` is {default_text(key.default)}" for key in keys]
    return f": {in_words(texts)}" if texts else ""


def in_words(names: list[str]) -> str:
    """Return names as a list in a sentence."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def table(rows: list[str]) -> str:
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows, ""])


def row(key: Key, default: str, is_first: bool, note: str = "") -> str:
    """Return a setting as a row; the values that it may have stand after its meaning."""
    name = f"**`{key.name}`**" if is_first else f"`{key.name}`"
    is_choice = "Literal" in key.type or key.type.startswith("one of")
    values = ", ".join(f"`{value[1:-1]}`" for value in _QUOTED.findall(key.type))
    meaning = f"{note}{plain(key.doc)}" + (f" ({values})" if is_choice else "")
    return f"| {name} | {default_text(default)} | {meaning} |"


def default_text(default: str) -> str:
    return default if default == "required" else f"`{default}`"


def plain(text: str) -> str:
    """Return a comment as Markdown, in which names of pages are links."""
    escaped = text.replace("|", r"\|").replace("*", r"\*")
    return _PAGE_NAME.sub(r"[\1](\1.md)", escaped)


def page() -> str:
    """Return the page's text."""
    return SettingsPage(listed_recipes()).text()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
