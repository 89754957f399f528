"""Short names of the reward functions that are shipped, for `reward = "math"` in a config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from spmd_rl.errors import ConfigError

GRADERS = {
    "exact": "spmd_rl.rewards.match:exact",
    "contains": "spmd_rl.rewards.match:contains",
    "last_number": "spmd_rl.rewards.match:last_number",
    "math": "spmd_rl.rewards.math:math",
    "boxed_math": "spmd_rl.rewards.math:boxed_math",
    "dapo": "spmd_rl.rewards.dapo:dapo",
    "deepscaler": "spmd_rl.rewards.deepscaler:deepscaler",
    "multiple_choice": "spmd_rl.rewards.multiple_choice:multiple_choice",
    "exact_match": "spmd_rl.rewards.squad:exact_match",
    "f1": "spmd_rl.rewards.squad:f1",
    "ifeval": "spmd_rl.rewards.ifeval:ifeval",
}
BOXED = "boxed_"  # before the name of a grader of TEXT: it grades what is in the last \boxed{...}
TEXT = ("exact", "contains", "last_number", "multiple_choice", "exact_match", "f1")
PACKAGES = {
    "math": "math_verify",
    "boxed_math": "math_verify",
    "deepscaler": "math_verify",
    "ifeval": "langdetect",
}


def is_short_name(name: str) -> bool:
    """Return whether this can only be a short name: it says no module and no file."""
    return ":" not in name and "/" not in name and not name.endswith(".py")


def load_grader(said: str, name: str) -> Callable[..., Any]:
    """Return the reward function of a short name. `said` names the setting in errors.

    Raises: ConfigError for an unknown name, and for one that needs a package that is not installed.
    """
    inner = name.removeprefix(BOXED)
    if name in GRADERS:
        _check_package(said, name)
        return _imported(GRADERS[name])
    if name.startswith(BOXED) and inner in TEXT:
        from spmd_rl.rewards.boxed import in_last_box

        return in_last_box(_imported(GRADERS[inner]))
    known = ", ".join(GRADERS)
    raise ConfigError(
        f"{said}: there is no grader of this name (there are: {known}; and {BOXED} before "
        f"{', '.join(TEXT)}): name one, or write package.module:function or "
        "path/to/file.py:function"
    )


def _imported(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _check_package(said: str, name: str) -> None:
    package = PACKAGES.get(name, "")
    if package:
        try:  # here, so that no call waits for it
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{said}: it needs the package {package}: pip install -e '.[rewards]' in the "
                "repository of spmd_rl"
            ) from error
