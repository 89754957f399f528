"""Difference between two JSON values, as a list of changes that can be stored and made again."""

from __future__ import annotations

import json
from typing import Any

from spmd_rl.errors import DataError

Change = list[Any]  # [path, value] sets a value; [path] removes one


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal; unlike in Python, 1 is neither 1.0 nor true."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def difference(have: Any, want: Any, path: tuple[str | int, ...] = ()) -> list[Change]:
    """Return the changes that make `want` of `have`."""
    if isinstance(have, dict) and isinstance(want, dict):
        changes: list[Change] = [[[*path, key]] for key in have if key not in want]
        for key, value in want.items():
            if key in have:
                changes += difference(have[key], value, (*path, key))
            else:
                changes.append([[*path, key], value])
        return changes
    if isinstance(have, list) and isinstance(want, list) and len(have) == len(want):
        return [
            change
            for index, (left, right) in enumerate(zip(have, want, strict=True))
            for change in difference(left, right, (*path, index))
        ]
    return [] if same(have, want) else [[[*path], want]]


def apply(value: Any, changes: list[Change]) -> Any:
    """Return a copy of `value` with the changes made. Raises: DataError where one does not fit."""
    root = [json.loads(json.dumps(value))]
    try:
        for change in changes:
            path, new = change[0], change[1:]
            place: Any = root
            keys: list[Any] = [0, *path]
            for key in keys[:-1]:
                place = place[key]
            last = keys[-1]
            if new:
                place[last] = new[0]
            else:
                del place[last]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError("extra", "what was kept of the original does not fit") from error
    return root[0]
