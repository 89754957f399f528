"""Cache of decoded messages: calls repeat, and differ only in the contents of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_ENTRIES = 64
MAX_KEY_BYTES = 1024
_CONSTANTS = (type(None), bool, int, float, str, bytes)

V = TypeVar("V")
Build = Callable[[bytearray], Any]  # makes a value from a payload
ArrayLayout = tuple[tuple[int, ...], np.dtype[Any], int]  # shape, dtype, offset in the payload
_array = np.ndarray


def store(cache: dict[bytes, V], key: bytes, value: V) -> None:
    """Store what the bytes `key` decode to, in bounded memory."""
    if len(key) <= MAX_KEY_BYTES:
        if len(cache) >= MAX_ENTRIES:
            cache.clear()
        cache[key] = value


def builder_for(value: Any, layouts: Mapping[int, ArrayLayout]) -> Build | None:
    """Return a function that makes `value` again, with arrays from another payload.

    `layouts` has the layout of each array in `value`, by the array's id. Returns None for a value
    that is more than arrays, scalars and lists of them: a class may inspect what it is made from.
    """
    kind = type(value)
    if _is_array(value, layouts):
        return _array_builder(*layouts[id(value)])
    if kind in _CONSTANTS:
        return lambda payload: value
    if kind is list and all(_is_array(item, layouts) for item in value):
        return _array_list_builder([layouts[id(item)] for item in value])
    if kind in (list, tuple):
        return _sequence_builder(value, layouts, as_tuple=kind is tuple)
    return None


def _is_array(value: Any, layouts: Mapping[int, ArrayLayout]) -> bool:
    return type(value) is _array and id(value) in layouts


def _array_builder(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Build:
    return lambda payload: _array(shape, dtype, payload, offset)


def _array_list_builder(layouts: list[ArrayLayout]) -> Build:
    def build_arrays(payload: bytearray) -> list[NDArray[Any]]:
        arrays = []
        for shape, dtype, offset in layouts:
            arrays.append(_array(shape, dtype, payload, offset))
        return arrays

    return build_arrays


def _sequence_builder(
    items: Sequence[Any], layouts: Mapping[int, ArrayLayout], *, as_tuple: bool
) -> Build | None:
    builds: list[Build] = []
    for item in items:
        build = builder_for(item, layouts)
        if build is None:
            return None
        builds.append(build)

    def build_sequence(payload: bytearray) -> Sequence[Any]:
        built = []
        for build in builds:
            built.append(build(payload))
        return tuple(built) if as_tuple else built

    return build_sequence
