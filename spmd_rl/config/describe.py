"""Description of a config class: each key with its type, its default and its comment."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from spmd_rl.config.schema import (
    KEYS,
    KIND,
    classes_by_kind,
    classes_by_name,
    inherited_default,
    key_fields,
    one_of,
    table_classes,
    type_hints,
    type_name,
)

NAME = "NAME"  # in a key of a table by name, such as eval.sets.NAME.data


@dataclass(frozen=True)
class Key:
    """One settable key: dotted name, type and default as text, and the comment beside the field."""

    name: str
    type: str
    default: str
    doc: str


def describe(cls: type) -> list[Key]:
    """Return every key of `cls`, nested ones dotted, in the order of definition.

    Where a key holds a class chosen by its `kind`, the keys of every kind are listed. Where it
    holds several by name, their keys are listed once. Keys of a table that do not serve where it
    stands (`KEYS` in the metadata of its field) are left out.
    """
    return list(_keys(cls, "", MISSING))


def _keys(cls: type, prefix: str, base: Any, names: Collection[str] = ()) -> Iterator[Key]:
    hints, comments = type_hints(cls), _inherited_comments(cls)
    for field in key_fields(cls):
        if names and field.name not in names:
            continue
        default = inherited_default(field, cls, base)
        name, hint = prefix + field.name, hints[field.name]
        classes = table_classes(hint)
        if len(classes) > 1:
            yield from _keys_by_kind(classes, name, default)
        elif classes:
            yield from _keys(classes[0], f"{name}.", default, field.metadata.get(KEYS, ()))
        elif named := classes_by_name(hint):
            yield from _keys(named[0], f"{name}.{NAME}.", MISSING)
        else:
            comment = comments.get(field.name, "")
            yield Key(name, type_name(hint), _default_text(default), comment)


def _default_text(default: Any) -> str:
    return "required" if default is MISSING else repr(default)


def _keys_by_kind(classes: list[type], name: str, default: Any) -> Iterator[Key]:
    """Yield the key `kind`, and then the keys of each kind, which their comments name."""
    by_kind = classes_by_kind(classes)
    chosen = type(default) if type(default) in classes else classes[0]
    kind_key = _kind_key(by_kind, chosen, name)
    yield kind_key
    for kind, cls in by_kind.items():
        for key in _keys(cls, f"{name}.", default):
            if key.name != kind_key.name:
                yield Key(key.name, key.type, key.default, f"[{kind}] {key.doc}".rstrip())


def _kind_key(by_kind: dict[str, type], chosen: type, name: str) -> Key:
    """Return the key `kind` of the table `name`, whose default is the kind of class `chosen`."""
    default = next(kind for kind, cls in by_kind.items() if cls is chosen)
    doc = _inherited_comments(chosen).get(KIND, "")
    return Key(f"{name}.{KIND}", one_of(by_kind), repr(default), doc)


def _inherited_comments(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        found |= {name: comment for name, comment in _comments(ancestor).items() if comment}
    return found


@cache
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
            found[node.target.id] = _comment_of(node, lines)
    return found


def _comment_of(node: ast.AnnAssign, lines: list[str]) -> str:
    last_line = lines[(node.end_lineno or node.lineno) - 1]
    behind = last_line[node.end_col_offset or 0 :].strip()
    return behind.lstrip("# ") if behind else _comment_above(lines, node.lineno)


def _comment_above(lines: list[str], line: int) -> str:
    """Return the text of the comment lines that end right above line number `line`."""
    texts = (text.strip() for text in reversed(lines[: line - 1]))
    comment = list(takewhile(lambda text: text.startswith("#"), texts))
    return " ".join(text.lstrip("# ") for text in reversed(comment))
