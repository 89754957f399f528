"""Rules for config values, for `__post_init__`: an error reads `name = value: expected ...`."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from spmd_rl.errors import ConfigError


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise a ConfigError that says what was expected of the key `name`, unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def at_least(cfg: Any, least: Mapping[str, float]) -> None:
    """Require that each named number (`steps`, `sampling.num_samples`) has its least value or more.

    Raises: ConfigError, which names the first that is less.
    """
    for name, bound in least.items():
        value = attrgetter(name)(cfg)
        require(value >= bound, name, value, f"{bound} or more")
