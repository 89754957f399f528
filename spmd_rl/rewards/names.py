"""Short names of the reward functions that are shipped, for `reward = "math"` in a config."""

from __future__ import annotations

import os

from spmd_rl.config.likely import did_you_mean
from spmd_rl.errors import ConfigError

GRADERS = {
    "exact": "spmd_rl.rewards.answers.match:exact",
    "contains": "spmd_rl.rewards.answers.match:contains",
    "last_number": "spmd_rl.rewards.answers.match:last_number",
    "math": "spmd_rl.rewards.answers.math:math",
    "boxed_math": "spmd_rl.rewards.answers.math:boxed_math",
    "dapo": "spmd_rl.rewards.answers.dapo:dapo",
    "deepscaler": "spmd_rl.rewards.answers.deepscaler:deepscaler",
    "multiple_choice": "spmd_rl.rewards.answers.multiple_choice:multiple_choice",
    "exact_match": "spmd_rl.rewards.answers.squad:exact_match",
    "f1": "spmd_rl.rewards.answers.squad:f1",
    "ifeval": "spmd_rl.rewards.instructions.graders:ifeval",
    "ifbench": "spmd_rl.rewards.instructions.graders:ifbench",
    "code": "spmd_rl.rewards.code.graders:code",
    "environment": "spmd_rl.rewards.answers.environment:environment",
    "remote": "spmd_rl.rewards.remote.remote:remote",
    "judge": "spmd_rl.rewards.remote.judge:judge",
}
_SHORT = {target: name for name, target in GRADERS.items()}
BOXED = "boxed_"  # before the name of a grader of TEXT: it grades what is in the last \boxed{...}
TEXT = ("exact", "contains", "last_number", "multiple_choice", "exact_match", "f1")
PACKAGES = {
    "math": "math_verify",
    "boxed_math": "math_verify",
    "deepscaler": "math_verify",
    "ifeval": "langdetect",
    "remote": "httpx",
    "judge": "httpx",
}


def is_short_name(name: str) -> bool:
    """Return whether this can only be a short name: it says no module and no file."""
    return ":" not in name and "/" not in name and not name.endswith(".py")


def is_shipped(name: str) -> bool:
    """Return whether a name, in any form, is that of a shipped grader."""
    return canonical_name(name).removeprefix(BOXED) in GRADERS


def canonical_name(name: str) -> str:
    """Return the one name of a reward function that has several: a shipped one's is its short name,
    and the path of a file is relative to the working folder if the file is in it.

    Names are compared in this form. Nothing is imported.
    """
    where, colon, function = name.rpartition(":")
    if not where.endswith(".py"):
        return _SHORT.get(name, name)
    path = os.path.normpath(where)
    inside = os.path.isabs(path) and os.path.relpath(path)
    if inside and not inside.startswith(os.pardir):
        path = inside
    return f"{path}{colon}{function}"


def find_grader(said: str, name: str) -> tuple[str, bool]:
    """Return the `module:function` of a short name, and whether it reads the last box only.

    `said` names the setting in errors. Raises: ConfigError for an unknown name.
    """
    if name in GRADERS:
        return GRADERS[name], False
    inner = name.removeprefix(BOXED)
    if name.startswith(BOXED) and inner in TEXT:
        return GRADERS[inner], True
    raise ConfigError(
        f"{said}: there is no grader of this name (there are: {', '.join(GRADERS)}; and {BOXED} "
        f"before {', '.join(TEXT)}): name one, or write package.module:function or "
        f"path/to/file.py:function{did_you_mean(name, GRADERS)}"
    )
