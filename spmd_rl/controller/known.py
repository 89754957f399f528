"""What was decoded once need not be decoded again: calls repeat, and differ in their arrays alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

MAX_KNOWN = 64
MAX_KNOWN_BYTES = 1024
_CONSTANTS = (type(None), bool, int, float, str, bytes)

V = TypeVar("V")
Build = Callable[[bytearray], Any]  # from a payload to a value


def remember(known: dict[bytes, V], key: bytes, value: V) -> None:
    """Keep what these bytes stand for, in bounded memory."""
    if len(key) <= MAX_KNOWN_BYTES:
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[key] = value


def like(value: Any, arrays: Mapping[int, Build]) -> Build | None:
    """How to make another value that differs from this one in the contents of its arrays alone.

    `arrays` has how to read each, by the id of the one in `value`. None where there is more than arrays and plain
    data, for a class may look at what it is given.
    """
    if isinstance(value, np.ndarray):
        return arrays.get(id(value))
    if type(value) in _CONSTANTS:
        return lambda payload: value
    if type(value) is list:
        return _list_like([like(item, arrays) for item in value])
    if type(value) is dict:
        return _dict_like({key: like(item, arrays) for key, item in value.items()})
    return None


def _list_like(parts: list[Build | None]) -> Build | None:
    builds = [build for build in parts if build is not None]

    def build_list(payload: bytearray) -> list[Any]:
        items = []
        for build in builds:
            items.append(build(payload))
        return items

    return build_list if len(builds) == len(parts) else None


def _dict_like(parts: dict[Any, Build | None]) -> Build | None:
    builds = [(key, build) for key, build in parts.items() if build is not None]

    def build_dict(payload: bytearray) -> dict[Any, Any]:
        items = {}
        for key, build in builds:
            items[key] = build(payload)
        return items

    return build_dict if len(builds) == len(parts) else None
