"""ConfigCodec: decodes a role's config and settings, where a `kind` may choose among classes.

The decoder of the wire takes no union of config classes, as that of `TrainerConfig.backend` is. A
config that has one is first decoded to plain data, and then by the `kind` of each such table.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from spmd_rl.config.schema import KIND, classes_by_kind, table_classes
from spmd_rl.controller.channel.codec import Codec, Packed
from spmd_rl.errors import ContractError


class ConfigCodec:
    """Decodes a config of class `cfg_type`, and settings of `types` after it."""

    def __init__(self, cfg_type: type, types: Sequence[Any]) -> None:
        self._cfg_type = cfg_type
        self._is_plain = not _has_kinds(cfg_type)
        annotation = (cfg_type if self._is_plain else dict[str, Any], *types)
        self._codec = Codec(tuple[annotation])  # type: ignore[valid-type]

    def unpack(self, packed: Packed) -> tuple[Any, ...]:
        """Return config and settings.

        Raises: ContractError saying where the value does not fit.
        """
        config, *settings = self._codec.unpack(packed)
        if self._is_plain:
            return (config, *settings)
        try:
            return (_by_kinds(self._cfg_type, config), *settings)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise ContractError(f"{self._cfg_type.__name__}: {error}") from error


def _has_kinds(cls: type) -> bool:
    """Return whether a config class has a field of several classes, at any depth."""
    tables = [table_classes(hint) for hint in typing.get_type_hints(cls).values()]
    return any(len(classes) > 1 or any(map(_has_kinds, classes)) for classes in tables)


def _by_kinds(cls: type, table: dict[str, Any]) -> Any:
    """Return the config of plain data. Every field must be there, and no other."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    if table.keys() != set(names):
        raise ValueError(f"expected the fields {', '.join(names)}, got {', '.join(table)}")
    return cls(**{name: _value(hints[name], table[name]) for name in names})


def _value(hint: Any, value: Any) -> Any:
    classes = table_classes(hint)
    if len(classes) > 1:
        return _by_kinds(classes_by_kind(classes)[value[KIND]], value)
    if classes and value is not None and _has_kinds(classes[0]):
        return _by_kinds(classes[0], value)
    return msgspec.convert(value, hint)
