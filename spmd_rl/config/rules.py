"""What a config's values must be, said in one way: `name = value: expected ...`. For
`__post_init__`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from spmd_rl.errors import ConfigError


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raises: ConfigError, which says what was expected of the key `name`, where it does not hold."""
    if not holds:
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def at_least(cfg: Any, least: Mapping[str, float]) -> None:
    """Each named number (`steps`, `sampling.num_samples`) has its least value, or more.

    Raises: ConfigError, which names the first that has not.
    """
    for name, bound in least.items():
        value = attrgetter(name)(cfg)
        require(value >= bound, name, value, f"{bound} or more")


def refuse_given(cfg: Any) -> None:
    """Keys of a recipe's parts (`trainer.model`) that it fills in from others (`model`), as its
    `given` says, are left alone, so that nothing that is set is ignored; `--help` does not list
    them.

    Raises: ConfigError, which names the first that was set, and the key to set instead.
    """
    for name, other in cfg.given.items():
        owner, key = name.rsplit(".", 1)
        part = attrgetter(owner)(cfg)
        value = getattr(part, key)
        if value != next(one.default for one in fields(part) if one.name == key):
            raise ConfigError(
                f"{name} = {value!r}: this recipe takes it from {other!r}; set that instead"
            )
