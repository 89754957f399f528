"""From a TOML file and dotted overrides to frozen dataclasses, strictly; and back to TOML.

    cfg = load(Config, Path("demo.toml"), ["steps=40", "trainer.lr=1e-3"])

The dataclasses stand beside the classes that read them; this file only knows how to fill any of
them. A table that names some keys of a nested dataclass changes those and keeps the parent's
default for the rest. An override's text is read by its field's type: `true`, `3`, `1e-3`, `[1, 2]`,
`{"a": 1}`, `none`, or the bare word for a string.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from spmd_rl.config.values import parse, toml_lines, toml_value
from spmd_rl.errors import ConfigError

C = TypeVar("C")

# metadata of a field that nobody sets: a run fills it in, and no file or `--help` shows it
NO_KEY = {"key": False}

WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)  # those of 64 bits
NEAR = 0.75  # how like two keys' last words must be, of 1, for one to be meant by the other
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Key:
    """One settable key: dotted name, type and default as text, and the comment beside the field."""

    name: str
    type: str
    default: str
    doc: str


class _Text(str):
    """Text from the command line: its type is still to be read from the field."""


def load(
    cls: type[C], toml: str | Path | None = None, overrides: Mapping[str, str] | Sequence[str] = ()
) -> C:
    """A `cls` from its defaults, then the TOML file, then the overrides (`{"a.b": "c"}` or
    `["a.b=c"]`).

    Raises: ConfigError, which names the key and what was expected.
    """
    table = read_toml(Path(toml)) if toml is not None else {}
    for name, text in _pairs(overrides):
        _insert(table, name, text)
    return typing.cast(C, _dataclass(table, cls, "", MISSING, cls))


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises: ConfigError when it is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def dump_toml(cfg: Any) -> str:
    """TOML that `load` reads back to an equal dataclass. A key that is None is left out."""
    return "\n".join(toml_lines(_plain(cfg), "")).strip() + "\n"


def describe(cls: type) -> list[Key]:
    """Every settable key of `cls`, nested ones dotted, in the order of definition."""
    return list(_describe(cls, "", MISSING))


def _pairs(overrides: Mapping[str, str] | Sequence[str]) -> Iterator[tuple[str, str]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for item in overrides:
        name, equals, text = item.removeprefix("--").partition("=")
        if not equals or not name:
            raise ConfigError(f"override {item!r} is not of the form key=value")
        yield name, text


def _insert(table: dict[str, Any], name: str, text: str) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: {parent!r} holds a value, not a table")
    table[last] = _Text(text)


def _convert(value: Any, hint: Any, key: str, base: Any, root: type) -> Any:
    """`value` as type `hint`; `base` is what the key would hold without it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _dataclass(value, typing.cast(type, hint), key, base, root)
    if origin in (Union, types.UnionType):
        return _union(value, args, key, base, root)
    if isinstance(value, _Text):
        value = parse(value, hint)
    if origin is Literal and value in args:
        return value
    if origin is dict and isinstance(value, dict):
        start = dict(base) if isinstance(base, dict) else {}
        return start | {
            k: _convert(v, args[1], f"{key}.{k}", MISSING, root) for k, v in value.items()
        }
    if origin is list and isinstance(value, list):
        return [_convert(v, args[0], f"{key}[{i}]", MISSING, root) for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        hints = [args[0]] * len(value) if args[1:] == (Ellipsis,) else list(args)
        if len(hints) == len(value):
            items = enumerate(zip(value, hints, strict=True))
            return tuple(_convert(v, h, f"{key}[{i}]", MISSING, root) for i, (v, h) in items)
    if hint in (int, float) and type(value) is int and value not in WHOLE_NUMBERS:
        raise ConfigError(
            f"{key}: expected {_words(hint)} that 64 bits hold, got one of {value.bit_length()} bits"
        )
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or (hint in _SCALARS and type(value) is hint):
        return value
    raise ConfigError(f"{key}: expected {_words(hint)}{_example(value, hint, base)}, got {value!r}")


def _dataclass(value: Any, cls: type, key: str, base: Any, root: type) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{key}: expected a table with keys such as {key}.{fields(cls)[0].name}, got {value!r}"
        )
    prefix = f"{key}." if key else ""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in _keys(cls)}
    for name in value:
        if name not in known:
            raise ConfigError(f"unknown key {prefix + name!r}{_nearest(prefix + name, root)}")
    filled: dict[str, Any] = {}
    for name, field in known.items():
        held = getattr(base, name) if isinstance(base, cls) else _default(field)
        if name in value:
            held = _convert(value[name], hints[name], prefix + name, held, root)
        elif held is MISSING and is_dataclass(hints[name]):
            held = _dataclass({}, typing.cast(type, hints[name]), prefix + name, MISSING, root)
        filled[name] = held
    if missing := [
        (prefix + name, _words(hints[name])) for name, held in filled.items() if held is MISSING
    ]:
        raise ConfigError(
            "; ".join(
                f"{name} is required: say --{name} VALUE ({words})" for name, words in missing
            )
        )
    try:
        return cls(**filled)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def _union(value: Any, members: tuple[Any, ...], key: str, base: Any, root: type) -> Any:
    if isinstance(value, _Text) and value.lower() == "none" and type(None) in members:
        return None
    rest = [m for m in members if m is not type(None)]
    # every text is a string, so that is tried last
    for member in sorted(rest, key=lambda m: m is str):
        if is_dataclass(member) and isinstance(value, dict):
            return _convert(value, member, key, base, root)
        try:
            return _convert(value, member, key, base, root)
        except ConfigError:
            continue
    expected = " or ".join(_words(member) for member in members)
    raise ConfigError(f"{key}: expected {expected}, got {str(value)!r}")


def _keys(cls: Any) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init and field.metadata.get("key", True)]


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _nearest(name: str, root: type) -> str:
    """The end of a sentence that names the known key, or table of keys, which is most like `name`,
    if any really is, or whose comment begins with its words.
    """
    last, keys = name.rpartition(".")[2], describe(root)

    def likeness(known: str) -> tuple[float, float]:
        same, whole = ((last, known.rpartition(".")[2]), (name, known))
        return difflib.SequenceMatcher(None, *same).ratio(), difflib.SequenceMatcher(
            None, *whole
        ).ratio()

    known = [part for key in keys for part in accumulate(key.name.split("."), "{}.{}".format)]
    said = [key.name for key in keys if "_" in last and key.doc.startswith(last.replace("_", " "))]
    nearest = max(known, key=likeness, default="")
    if likeness(nearest)[0] < NEAR:
        nearest = max(said, key=lambda key: likeness(key)[1], default="")
    return f"; the nearest known key is {nearest!r}" if nearest else ""


def _example(value: Any, hint: Any, base: Any) -> str:
    """How a shell is told a list or a table, where something else was given."""
    if typing.get_origin(hint) is dict and isinstance(value, str):
        item = {str: "text", int: 1, float: 0.5}.get(typing.get_args(hint)[1], True)
        return f" such as '{json.dumps({'name': item})}'"
    listed = typing.get_origin(hint) in (list, tuple) and not isinstance(value, list)
    if listed and isinstance(value, str) and typing.get_args(hint)[0] is str:
        return f" such as '{json.dumps([value.strip('[]')])}'"
    return f" such as {toml_value(_plain(base))}" if listed and base and base is not MISSING else ""


def _words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (list, tuple):
        if origin is tuple and args[1:] != (Ellipsis,):
            return f"a list of exactly {len(args)} values"
        return f"a list (each {_words(args[0])})"
    if origin is dict:
        return f"a table (each value {_words(args[1])})"
    return (
        "none" if hint is type(None) else _SCALARS.get(hint, getattr(hint, "__name__", str(hint)))
    )


def _type_name(hint: Any) -> str:
    return (
        hint.__name__
        if isinstance(hint, type) and not typing.get_args(hint)
        else str(hint).replace("typing.", "")
    )


def _describe(cls: type, prefix: str, base: Any) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    docs = {
        name: doc for one in reversed(cls.__mro__) for name, doc in _comments(one).items() if doc
    }
    for field in _keys(cls):
        held = getattr(base, field.name) if isinstance(base, cls) else _default(field)
        name, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            yield from _describe(typing.cast(type, hint), name + ".", held)
        else:
            yield Key(
                name,
                _type_name(hint),
                "required" if held is MISSING else repr(held),
                docs.get(field.name, ""),
            )


def _comments(cls: type) -> dict[str, str]:
    """Map a field's name to the comment at the end of its line, or on the lines right above it."""
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except (OSError, TypeError):
        return {}
    body = typing.cast(ast.ClassDef, ast.parse("\n".join(lines)).body[0]).body
    found: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            tail = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
            found[node.target.id] = (
                tail.lstrip("# ") if tail else _comment_above(lines, node.lineno)
            )
    return found


def _comment_above(lines: list[str], line: int) -> str:
    """Return the text of the comment lines that end right above line number `line`."""
    texts = (text.strip() for text in reversed(lines[: line - 1]))
    comment = list(takewhile(lambda text: text.startswith("#"), texts))
    return " ".join(text.lstrip("# ") for text in reversed(comment))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in _keys(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
