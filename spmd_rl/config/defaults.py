"""Which settings of a config are not the defaults of their classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from typing import Any

from spmd_rl.config.dump import as_data
from spmd_rl.config.schema import KIND, default_of, key_fields


def changed_defaults(cfg: Any) -> dict[str, Any]:
    """Return the defaults of the settings that differ from them, as plain data by dotted key.

    The default is None for a setting that has to be given, and for an entry of a table.
    """
    return dict(_changed(cfg, MISSING, ""))


def _changed(value: Any, default: Any, key: str) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        for field in key_fields(value):
            own = _default_in(default, type(value), field)
            yield from _changed(getattr(value, field.name), own, _join(key, field.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            own = default.get(name, MISSING) if isinstance(default, dict) else MISSING
            yield from _changed(item, own, _join(key, str(name)))
    elif value is not None and (default is MISSING or as_data(value) != as_data(default)):
        yield key, None if default is MISSING else as_data(default)


def _default_in(default: Any, cls: type, field: Any) -> Any:
    """Return a field's default, where the table of the field has the default `default`."""
    has_field = isinstance(default, cls) or (field.name == KIND and hasattr(default, KIND))
    return getattr(default, field.name) if has_field else default_of(field)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
