"""Settings of runs: the config as given, the plan as resolved, and where runs differ."""

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
    """Return `config.toml` by dotted key. Raises: DataError when it does not parse."""
    path = run / "config.toml"
    try:
        return (
            dict(_leaves(tomllib.loads(path.read_text(encoding="utf-8")))) if path.exists() else {}
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(str(path), f"not valid TOML: {error}") from None
    except RecursionError:
        raise DataError(str(path), "not valid TOML: it is nested too deeply") from None


def read_plan(run: Path) -> Any:
    """Return `plan.json`. Raises: DataError when it does not parse."""
    path = run / "plan.json"
    return (
        parse_finite_json(str(path), path.read_bytes(), replace_non_finite=str)
        if path.exists()
        else {}
    )


def differences(
    configs: Sequence[dict[str, Any]], folders: Sequence[Path] | None = None
) -> list[tuple[str, list[str | None]]]:
    """Return the keys whose values differ, each with its values as text, None if unset.

    Two paths of the same file are equal. Relative paths start in `folders`, where the runs were
    started.
    """
    folders = folders or [Path()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [
        (key, [as_text(config[key]) if key in config else None for config in configs])
        for key in keys
    ]
    return [(key, values) for key, values in rows if _differ(values, folders)]


def _differ(values: Sequence[str | None], folders: Sequence[Path]) -> bool:
    return len(set(values)) > 1 and len(set(map(_same_file, values, folders))) > 1


def _same_file(value: str | None, folder: Path) -> str | None:
    """Return an existing path in its canonical form, any other value as it is.

    A slice of records or the name of a function after the path is kept.
    """
    path = re.sub(r"(@\[[^\]]*\]|:\w+)\Z", "", value or "")
    full_path = os.path.join(folder, path)
    if not value or not path or not os.path.exists(full_path):
        return value
    return os.path.realpath(full_path) + value[len(path) :]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
