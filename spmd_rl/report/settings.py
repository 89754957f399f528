"""What a run was given and what that resolved to, and where several runs differ."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_finite_json


def read_config(run: Path) -> dict[str, Any]:
    """`config.toml` by dotted key. Raises: DataError when it does not parse."""
    path = run / "config.toml"
    try:
        return (
            dict(_leaves(tomllib.loads(path.read_text(encoding="utf-8")))) if path.exists() else {}
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(str(path), f"not TOML: {error}") from None
    except RecursionError:
        raise DataError(str(path), "not TOML: it is nested too deeply") from None


def read_plan(run: Path) -> Any:
    """`plan.json` as it is. Raises: DataError when it does not parse."""
    path = run / "plan.json"
    return (
        parse_finite_json(str(path), path.read_bytes(), replace_non_finite=str)
        if path.exists()
        else {}
    )


def differences(
    configs: Sequence[dict[str, Any]], folders: Sequence[Path] | None = None
) -> list[tuple[str, list[str | None]]]:
    """The keys whose values are not the same in all `configs`, each with its values as text; None
    where unset.

    Paths of one file are the same value; relative ones begin in `folders`, in which the runs were
    started.
    """
    folders = folders or [Path()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [
        (key, [as_text(config[key]) if key in config else None for config in configs])
        for key in keys
    ]
    return [
        (key, values)
        for key, values in rows
        if len(set(values)) > 1 and len(set(map(_same_file, values, folders))) > 1
    ]


def _same_file(value: str | None, folder: Path) -> str | None:
    """A path that exists in its one spelling; a slice of its records or a function in it stays as
    written.
    """
    path = re.sub(r"(@\[[^\]]*\]|:\w+)\Z", "", value or "")
    place = os.path.join(folder, path)
    return (
        os.path.realpath(place) + (value or "")[len(path) :]
        if path and os.path.exists(place)
        else value
    )


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
