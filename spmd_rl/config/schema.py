"""Schema of a config class: its keys, their defaults, and the words for their types.

A field may have several config classes as its type. Each then has a field `kind`, whose one
literal value chooses the class:

    engine: NativeEngineConfig | OtherEngineConfig      # engine.kind = "native" or "other"
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union

KIND = "kind"
KEYS = "keys"  # in a field's metadata: the keys of its table that serve there, which help shows
SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    type(None): "none",
}
UNIONS = (Union, types.UnionType)


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Return the types of a class's fields by name; nobody may change them."""
    return typing.get_type_hints(cls)


def key_fields(cls: Any) -> list[Field[Any]]:
    """Return the fields of a config class that are keys: `kind` first, then required ones."""
    keys = [field for field in fields(cls) if field.init]
    return sorted(keys, key=lambda field: (field.name != KIND, not _is_required(field)))


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def default_of(field: Field[Any]) -> Any:
    """Return a field's default, MISSING where it is required."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def inherited_default(field: Field[Any], cls: type, base: Any) -> Any:
    """Return a field's value in `base` if that is a `cls`, else the field's own default."""
    return getattr(base, field.name) if isinstance(base, cls) else default_of(field)


def table_classes(hint: Any) -> list[type]:
    """Return the config classes that a key of this type may hold, the default one first."""
    members = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    return [member for member in members if isinstance(member, type) and is_dataclass(member)]


def classes_by_name(hint: Any) -> list[type]:
    """Return the config class whose instances a key of this type holds by name, if it does."""
    return table_classes(typing.get_args(hint)[1]) if typing.get_origin(hint) is dict else []


def classes_by_kind(classes: list[type]) -> dict[str, type]:
    """Return config classes by the value of their `kind`.

    Raises: TypeError for a class without a `kind` of one literal value.
    """
    found: dict[str, type] = {}
    for cls in classes:
        values = typing.get_args(type_hints(cls).get(KIND))
        if len(values) != 1:
            raise TypeError(f"{cls.__name__} needs a field `kind` with one Literal value")
        found[values[0]] = cls
    return found


def type_in_words(hint: Any) -> str:
    """Return what a value of this type is called in an error message."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(type_in_words(member) for member in args)
    if origin is Literal:
        return one_of(args)
    if origin in (list, tuple):
        return _list_in_words(origin, args)
    if origin is dict:
        return f"a table (each value {type_in_words(args[1])})"
    return SCALARS.get(hint) or str(getattr(hint, "__name__", hint))


def _list_in_words(origin: type, args: tuple[Any, ...]) -> str:
    if origin is tuple and args[1:] != (Ellipsis,):
        return f"a list of exactly {len(args)} values"
    return f"a list (each {type_in_words(args[0])})"


def type_name(hint: Any) -> str:
    """Return a type as `--help-all` shows it."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "")


def one_of(values: typing.Iterable[Any]) -> str:
    """Return the words for a choice between literal values."""
    return "one of " + ", ".join(repr(value) for value in values)
