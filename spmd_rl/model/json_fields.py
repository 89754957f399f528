"""Typed reads of a JSON object's keys, with errors that name the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises: ConfigError when it holds none."""
    return parse_object(path, path.read_bytes())


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """Return the JSON object in the content of a file. Raises: as `read_object`."""
    try:
        raw = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return raw


# beyond these, no model is meant: they are refused before anything of this size is made
MOST_ROWS, MOST_LAYERS, MOST_EXPERTS = 1 << 24, 1 << 12, 1 << 14
MOST_POSITIONS = (1 << 31) - 1


@dataclass(frozen=True)
class Fields:
    """A JSON object, and in `where` the file it is from, for error messages.

    A key without a default must be there. Raises: ConfigError naming the key, in all methods.
    """

    where: str
    raw: Mapping[str, Any]

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST_ROWS
    ) -> int:
        """Return a whole number of `least` or more, and at most `most`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"a whole number of {least} or more")
        if value > most:
            raise self.wrong(key, f"a whole number of at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a finite number greater than `above`."""
        value = self.value(key, default)
        try:
            number = math.nan if isinstance(value, (bool, str)) else float(value)
        except (TypeError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number > above):
            raise self.wrong(key, f"a number greater than {above:g}")
        return number

    def optional(self, key: str) -> float | None:
        """Return a number greater than 0, or None where the key is absent or null."""
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; numbers and texts are refused."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def value(self, key: str, default: Any = None) -> Any:
        if key not in self.raw and default is None:
            raise ConfigError(f"{self.where} has no field {key!r}")
        return self.raw.get(key, default)

    def wrong(self, key: str, expected: str) -> ConfigError:
        text = json.dumps(self.raw.get(key))
        text = text if len(text) <= 80 else text[:77] + "..."
        return ConfigError(f"{self.where}: {key} is {text}: expected {expected}")
