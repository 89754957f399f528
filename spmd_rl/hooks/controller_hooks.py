"""Hooks that the controller calls itself: `keep_group` and `pick_sources`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.errors import DataError, SpmdError
from spmd_rl.hooks.context import HookContext, Keep
from spmd_rl.hooks.results import preview, problem_of
from spmd_rl.hooks.signatures import load_keep_group, load_pick_sources, part_name
from spmd_rl.types.groups import Group


class KeepGroup:
    """The function of that name, as a call that takes a group and returns a Keep.

    `config` is the recipe's config as plain nested data, and `seed` the run's. The recipe may set
    `step`, which the function finds in its context. One thread at a time may call it.
    """

    def __init__(self, name: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        """Import the function. Raises: ConfigError when it cannot be used."""
        self.step = 0
        self._function, self._name = load_keep_group(name), part_name(name)
        self._config, self._seed = dict(config or {}), seed

    def __call__(self, group: Group) -> Keep:
        """Return whether the group is trained on.

        Raises: DataError that names the group when the function raises or returns no Keep.
        """
        uid = group.prompt.uid
        version = max((int(one.versions.max(initial=-1)) for one in group.samples), default=-1)
        context = HookContext(self._config, self.step, version, False, self._seed, uid)
        try:
            keep = self._function(context, group)
        # a user's function may raise anything
        except (Exception, SystemExit) as error:
            raise DataError(self._where(group), problem_of(error, self._function)) from error
        if not isinstance(keep, Keep):
            raise DataError(self._where(group), f"returned no Keep: {preview(keep)}")
        return keep

    def _where(self, group: Group) -> str:
        return (
            f"keep_group {self._name} on prompt {group.prompt.uid} ({preview(group.prompt.text)})"
        )


def pick_of(name: str) -> Callable[[int, list[str]], Mapping[str, float]]:
    """Return a function that calls `hooks.pick_sources` of this name.

    It raises a SpmdError with function, step and line for whatever the function raises.
    Raises: ConfigError when there is no such function, also for its signature.
    """
    function = load_pick_sources(name)

    def pick(step: int, sources: list[str]) -> Mapping[str, float]:
        try:
            return function(step, sources)
        except SpmdError:
            raise
        except Exception as error:  # a user's function may raise anything
            problem = problem_of(error, function)
            raise SpmdError(f"hooks.pick_sources {name}, for step {step + 1}: {problem}") from error

    return pick
