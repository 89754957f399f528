"""Config from a TOML file and dotted overrides, strictly typed.

    cfg = load(Config, Path("demo.toml"), ["steps=40", "trainer.lr=1e-3"])

The config classes stand beside the classes that read them; this file can fill any of them. A table
that names some keys of a nested class changes those, and keeps the parent's default for the rest.
An override's text is read by its field's type: `true`, `3`, `1e-3`, `[1, 2]`, `{"a": 1}`, `none`,
or the bare word for a string.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.config.parse import parse
from spmd_rl.config.schema import (
    KIND,
    SCALARS,
    UNIONS,
    classes_by_kind,
    inherited_default,
    key_fields,
    one_of,
    table_classes,
    type_hints,
    type_in_words,
)
from spmd_rl.config.suggest import example, leaf_of, nearest_key, refuse_foreign
from spmd_rl.errors import ConfigError

C = TypeVar("C")

FromFile = Callable[[dict[str, Any], Mapping[str, str], Path | None], dict[str, Any]]

INT64 = range(-(1 << 63), 1 << 63)


class _Text(str):
    """Text from the command line, to be read by the type of its field."""


def load(
    cls: type[C],
    toml: str | Path | None = None,
    overrides: Mapping[str, str] | Sequence[str] = (),
    from_file: FromFile | None = None,
) -> C:
    """Return a `cls` from its defaults, then the TOML file, then the overrides.

    Overrides are `{"a.b": "c"}` or `["a.b=c"]`. `from_file` makes the settings of `cls` from the
    file's table, which is empty without a file, from the overrides and the file's path.
    Raises: ConfigError, which names the key and what was expected.
    """
    file = Path(toml) if toml is not None else None
    table = read_toml(file) if file is not None else {}
    given = list(_pairs(overrides))
    if from_file is not None:
        table = from_file(table, dict(given), file)
    for name in leaves(table):
        refuse_foreign(name, cls)
    for name, text in given:
        refuse_foreign(name, cls)
        _insert(table, name, text)
    return typing.cast(C, _Loader(cls).fill(table, cls, "", MISSING))


def from_data(cls: type[C], table: Mapping[str, Any]) -> C:
    """Return a `cls` from plain nested data, as `as_data` makes it; keys may be missing.

    Raises: ConfigError, which names the key and what was expected.
    """
    return typing.cast(C, _Loader(cls).fill(dict(table), cls, "", MISSING))


def overlay(base: C, settings: Mapping[str, Any], key: str) -> C:
    """Return a copy of config `base` with these settings, which stand at the dotted key `key`.

    Raises: ConfigError, which names the key and what was expected.
    """
    cls = type(base)
    return typing.cast(C, _Loader(cls).fill(dict(settings), cls, key, base))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's table. Raises: ConfigError when it is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}{did_you_mean_path(path)}"
        ) from error
    # not TOML, not UTF-8, a number of thousands of digits, or nested too deeply
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _pairs(overrides: Mapping[str, str] | Sequence[str]) -> Iterator[tuple[str, str]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for item in overrides:
        name, equals, text = item.removeprefix("--").partition("=")
        if not equals or not name:
            raise ConfigError(f"override {item!r} is not of the form key=value")
        yield name, text


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every value of a table that is no table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _insert(table: dict[str, Any], name: str, text: str) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: {parent!r} holds a value, not a table")
    table[last] = _Text(text)


class _Loader:
    """Fills config classes from tables. `root` is the class of the whole config.

    In all methods `key` is the dotted name of a value, and `base` its default.
    """

    def __init__(self, root: type) -> None:
        self._root = root

    def fill(self, table: Any, cls: type, key: str, base: Any) -> Any:
        """Return a `cls` with the keys of `table`."""
        if not isinstance(table, dict):
            example_key = f"{key}.{fields(cls)[0].name}"
            raise ConfigError(
                f"{key}: expected a table with keys such as {example_key}, got {table!r}"
            )
        prefix = f"{key}." if key else ""
        self._refuse_unknown(table, cls, prefix)
        values = self._values(table, cls, prefix, base)
        _require_all(values, cls, prefix)
        try:
            return cls(**values)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{key}: {error}" if key else str(error)) from error

    def _values(self, table: dict[str, Any], cls: type, prefix: str, base: Any) -> dict[str, Any]:
        """Return a value for each key of `cls`: that in `table`, else its default.

        A required key that `table` lacks has the value MISSING.
        """
        hints = type_hints(cls)
        values: dict[str, Any] = {}
        for field in key_fields(cls):
            name = field.name
            default = inherited_default(field, cls, base)
            needs_table = default is MISSING and table_classes(hints[name])
            if name in table or needs_table:
                values[name] = self.convert(
                    table.get(name, {}), hints[name], prefix + name, default
                )
            else:
                values[name] = default
        return values

    def _refuse_unknown(self, table: dict[str, Any], cls: type, prefix: str) -> None:
        names = {field.name for field in key_fields(cls)}
        for name in table:
            if name not in names:
                full = leaf_of(prefix + name, table[name], self._root)
                raise ConfigError(f"unknown key {full!r}{nearest_key(full, self._root)}")

    def convert(self, value: Any, hint: Any, key: str, base: Any) -> Any:
        """Return `value` as type `hint`."""
        if is_dataclass(hint):
            return self.fill(value, typing.cast(type, hint), key, base)
        if typing.get_origin(hint) in UNIONS:
            return self._union(value, hint, key, base)
        if isinstance(value, _Text):
            value = parse(value, hint)
        return self._parsed(value, hint, key, base)

    def _parsed(self, value: Any, hint: Any, key: str, base: Any) -> Any:
        """Return a parsed value as type `hint`, which is no config class and no union."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal and value in args:
            return value
        if origin is dict and isinstance(value, dict):
            return self._table(value, hint, key, base)
        if origin in (list, tuple) and isinstance(value, list):
            hints = _item_hints(hint, len(value))
            if len(hints) == len(value):
                return origin(self._items(value, hints, key))
        return _scalar(value, hint, key, base)

    def _items(self, items: list[Any], hints: list[Any], key: str) -> Iterator[Any]:
        for number, (item, hint) in enumerate(zip(items, hints, strict=True)):
            yield self.convert(item, hint, f"{key}[{number}]", MISSING)

    def _table(self, table: dict[str, Any], hint: Any, key: str, base: Any) -> dict[str, Any]:
        _, value_hint = typing.get_args(hint)
        default = dict(base) if isinstance(base, dict) else {}
        return default | {
            name: self.convert(value, value_hint, f"{key}.{name}", MISSING)
            for name, value in table.items()
        }

    def _union(self, value: Any, hint: Any, key: str, base: Any) -> Any:
        members, classes = typing.get_args(hint), table_classes(hint)
        if isinstance(value, _Text) and value.lower() == "none" and type(None) in members:
            return None
        if classes and isinstance(value, dict):
            cls = classes[0] if len(classes) == 1 else _chosen(value, classes, key, base)
            return self.fill(value, cls, key, base)
        return self._first_fit(value, hint, key, base)

    def _first_fit(self, value: Any, hint: Any, key: str, base: Any) -> Any:
        """Return `value` as the first member of union `hint` that it fits."""
        # every text is a string, so that is tried last
        for member in sorted(typing.get_args(hint), key=lambda member: member is str):
            try:
                return self.convert(value, member, key, base)
            except ConfigError:
                continue
        raise ConfigError(f"{key}: expected {type_in_words(hint)}, got {str(value)!r}")


def _chosen(table: dict[str, Any], classes: list[type], key: str, base: Any) -> type:
    """Return the class whose kind `table` names, else that of the default, else the first.

    Raises: ConfigError for an unknown kind, or a key of another kind alone.
    """
    by_kind = classes_by_kind(classes)
    kind = table.get(KIND, getattr(base, KIND, next(iter(by_kind))))
    if not isinstance(kind, str) or kind not in by_kind:
        raise ConfigError(f"{key}.{KIND}: expected {one_of(by_kind)}, got {kind!r}")
    _refuse_other_kinds(table, by_kind, kind, key)
    return by_kind[kind]


def _refuse_other_kinds(
    table: dict[str, Any], by_kind: dict[str, type], kind: str, key: str
) -> None:
    """Raises: ConfigError for a key of `table` that `kind` lacks and another kind has."""
    names = {other: {field.name for field in key_fields(by_kind[other])} for other in by_kind}
    for name in table.keys() - names[kind]:
        owners = [other for other in by_kind if name in names[other]]
        if owners:
            owner = f"{key}.{KIND} = {owners[0]!r}"
            raise ConfigError(f"{key}.{name} belongs to {owner}, but the kind is {str(kind)!r}")


def _require_all(values: dict[str, Any], cls: type, prefix: str) -> None:
    """Raises: ConfigError, which names every required key that was not set."""
    missing = [name for name, value in values.items() if value is MISSING]
    if missing:
        hints = type_hints(cls)
        sentences = [
            f"{prefix + name} is required: say --{prefix + name} VALUE "
            f"({type_in_words(hints[name])})"
            for name in missing
        ]
        raise ConfigError("; ".join(sentences))


def _item_hints(hint: Any, length: int) -> list[Any]:
    """Return the type of each item of a list or tuple of `length` items."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list or args[1:] == (Ellipsis,):
        return [args[0]] * length
    return list(args)


def _scalar(value: Any, hint: Any, key: str, base: Any) -> Any:
    """Return a value that is no list or table. Raises: ConfigError if it has another type."""
    if hint in (int, float) and type(value) is int and value not in INT64:
        bits = value.bit_length()
        raise ConfigError(
            f"{key}: expected {type_in_words(hint)} that 64 bits hold, got one of {bits} bits"
        )
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or (hint in SCALARS and type(value) is hint):
        return value
    expected = type_in_words(hint) + example(value, hint, base)
    raise ConfigError(f"{key}: expected {expected}, got {value!r}")
