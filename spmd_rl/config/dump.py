"""Config as TOML, which `load` reads back to an equal one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from spmd_rl.config.schema import key_fields


def as_data(value: Any) -> Any:
    """Return a config as plain nested data: dicts for dataclasses, and lists for tuples."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_data(getattr(value, field.name)) for field in key_fields(value)}
    if isinstance(value, dict):
        return {str(key): as_data(item) for key, item in value.items()}
    return [as_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def dump_toml(cfg: Any) -> str:
    """Return TOML that `load` reads back to an equal config. A key that is None is left out."""
    return "\n".join(_lines(as_data(cfg), "")).strip() + "\n"


def toml_text(value: Any) -> str:
    """Return a plain value as TOML on one line. Keys of a table that are None are left out."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, dict):
        items = [f"{_key(k)} = {toml_text(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(items) + "}"
    return str(value) if isinstance(value, int) else repr(float(value))


def _lines(table: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the lines of `table`, which stands at the dotted key `path` of its file."""
    for name, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{_key(name)} = {toml_text(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            inner = f"{path}.{_key(name)}" if path else _key(name)
            yield from ("", f"[{inner}]")
            yield from _lines(value, inner)


def _key(name: str) -> str:
    """Return a key bare where TOML takes it so, and quoted else."""
    is_bare = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if is_bare else toml_text(name)
