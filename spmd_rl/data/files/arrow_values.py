"""Values of Arrow tables, as the records would be written in JSON, each by itself.

A table gives every record the fields of all records, and fills them with nulls. So a null that
stands for a field says that the record has no such field. Text of the type `arrow.json` is decoded,
and keeps the nulls that are written in it. So do maps and lists, which are never filled up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd_rl.errors import DataError

_JSON = "arrow.json"  # the name of Arrow's extension type

Reader = Callable[[Any], Any]  # makes a record's value of one that pyarrow returns and is not null


def rows_of(batch: Any, places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a record batch, which stand at these places.

    Raises: DataError for two fields of one name, and for values that cannot be read.
    """
    names: list[str] = batch.schema.names
    _require_distinct(places[0], names)
    columns = [
        _column(column, name, places) for name, column in zip(names, batch.columns, strict=True)
    ]
    return [_without_nulls(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column(column: Any, name: str, places: Sequence[str]) -> list[Any]:
    read = _reader(column.type, f"{places[0]}: {name}")
    found: list[Any] = []
    try:
        values: list[Any] = column.to_pylist()
        if read is None:
            return values
        for value in values:
            found.append(None if value is None else read(value))
    except (ValueError, OverflowError, RecursionError) as error:
        where = f"{places[len(found)]}: {name}"
        raise DataError(where, f"this value cannot be read: {error}") from error
    return found


def _without_nulls(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def _reader(kind: Any, where: str) -> Reader | None:
    """Return what reads values of an Arrow type; None for those that pyarrow returns as they are.

    `where` names the column. Raises: DataError for two fields of one name, and for a union of
    which values do not tell their type.
    """
    from pyarrow import BaseExtensionType, types

    if types.is_struct(kind):
        return _struct_reader(kind, where)
    if types.is_map(kind):
        return _map_reader(kind, where)
    if types.is_union(kind):
        return _union_reader(kind, where)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _reader(kind.value_type, where)
    if isinstance(kind, BaseExtensionType):
        is_json = kind.extension_name == _JSON
        return json.loads if is_json else _reader(kind.storage_type, where)
    if types.is_nested(kind):  # a list of some kind
        return _list_reader(_reader(kind.value_type, where))
    return None


def _struct_reader(kind: Any, where: str) -> Reader:
    names = [field.name for field in kind]
    _require_distinct(where, names)
    readers = {field.name: _reader(field.type, f"{where}.{field.name}") for field in kind}

    def read(value: dict[str, Any]) -> dict[str, Any]:
        # JSON may spell a null too
        return _without_nulls(
            (name, inner if inner is None or (one := readers[name]) is None else one(inner))
            for name, inner in value.items()
        )

    return read


def _list_reader(read: Reader | None) -> Reader | None:
    if read is None:
        return None
    return lambda items: [None if item is None else read(item) for item in items]


def _map_reader(kind: Any, where: str) -> Reader:
    """Return what makes an object of a map, or a list of pairs where its keys are no texts."""
    read_value = _reader(kind.item_type, where) or (lambda value: value)

    def read(pairs: list[tuple[Any, Any]]) -> Any:
        made = [[key, None if value is None else read_value(value)] for key, value in pairs]
        if not all(isinstance(key, str) for key, _ in made):
            return made
        _require_distinct(where, [key for key, _ in made])
        return dict(made)

    return read


def _union_reader(kind: Any, where: str) -> Reader | None:
    """Return what reads values of all types of a union, of which only a struct may need a reader.

    A value does not tell its type, but an object can only be a struct's.
    """
    from pyarrow import types

    readers = [one for field in kind if (one := _reader(field.type, where))]
    num_structs = sum(types.is_struct(field.type) for field in kind)
    if len(readers) > 1 or len(readers) != num_structs:
        raise DataError(where, f"values of the type {kind} cannot be read")
    if not readers:
        return None
    (read,) = readers
    return lambda value: read(value) if isinstance(value, dict) else value


def _require_distinct(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(where, f"two fields are called {name!r}")
        seen.add(name)
