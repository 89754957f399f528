"""What was decoded once need not be decoded again: calls repeat, and differ in their arrays alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_KNOWN = 64
MAX_KNOWN_BYTES = 1024
_CONSTANTS = (type(None), bool, int, float, str, bytes)

V = TypeVar("V")
Build = Callable[[bytearray], Any]  # from a payload to a value
# of an array in the payload: its shape, dtype and offset
RoleContext = tuple[tuple[int, ...], np.dtype[Any], int]
_array = np.ndarray


def remember(known: dict[bytes, V], key: bytes, value: V) -> None:
    """Keep what these bytes stand for, in bounded memory."""
    if len(key) <= MAX_KNOWN_BYTES:
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[key] = value


def like(value: Any, places: Mapping[int, RoleContext]) -> Build | None:
    """How to make another value that differs from this one in the contents of its arrays alone.

    `places` has where each lies, by the id of the one in `value`. None where there is more than
    arrays and plain data, for a class may look at what it is given.
    """
    kind = type(value)
    if kind is _array and id(value) in places:
        return _array_like(*places[id(value)])
    if kind in _CONSTANTS:
        return lambda payload: value
    if kind is list and all(type(item) is _array and id(item) in places for item in value):
        return _arrays_like([places[id(item)] for item in value])
    if kind is list or kind is tuple:
        return _items_like([like(item, places) for item in value], kind is tuple)
    if kind is dict:
        return _dict_like({key: like(item, places) for key, item in value.items()})
    return None


def _array_like(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Build:
    return lambda payload: _array(shape, dtype, payload, offset)


def _arrays_like(places: list[RoleContext]) -> Build:
    def build_arrays(payload: bytearray) -> list[NDArray[Any]]:
        arrays = []
        for shape, dtype, offset in places:
            arrays.append(_array(shape, dtype, payload, offset))
        return arrays

    return build_arrays


def _items_like(parts: Sequence[Build | None], as_tuple: bool) -> Build | None:
    builds = [build for build in parts if build is not None]

    def build_items(payload: bytearray) -> Sequence[Any]:
        items = []
        for build in builds:
            items.append(build(payload))
        return tuple(items) if as_tuple else items

    return build_items if len(builds) == len(parts) else None


def _dict_like(parts: dict[Any, Build | None]) -> Build | None:
    builds = [(key, build) for key, build in parts.items() if build is not None]

    def build_dict(payload: bytearray) -> dict[Any, Any]:
        items = {}
        for key, build in builds:
            items[key] = build(payload)
        return items

    return build_dict if len(builds) == len(parts) else None
