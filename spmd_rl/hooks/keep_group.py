"""The hook `keep_group`, which the controller calls on each group that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.hooks.context import HookContext, Keep
from spmd_rl.hooks.results import describe, preview
from spmd_rl.hooks.signatures import load_keep_group, part_name
from spmd_rl.types.samples import Group


class KeepGroup:
    """Calls a user's `keep_group`. `config` is the recipe's config as plain data.

    It runs on a thread of the controller, so it should be quick. What it emits is not recorded.
    Raises: ConfigError when the function cannot be loaded, or has another signature.
    """

    def __init__(self, name: str, config: Mapping[str, Any], seed: int) -> None:
        self._name = part_name(name)
        self._function = load_keep_group(name)
        self._config = config
        self._seed = seed

    def __call__(self, group: Group) -> Keep:
        """Return what the function says. Raises: DataError when it raises, or says no `Keep`."""
        context = HookContext(
            self._config, seed=self._seed, prompt_uid=group.prompt.uid, metrics={}
        )
        where = f"keep_group {self._name} on {describe(group.prompt, group.samples)}"
        try:
            verdict = self._function(context, group)
        # a user's function may raise anything: report it with the group
        except Exception as error:
            problem = f"raised {type(error).__name__}: {preview(error, str)}"
            raise DataError(where, problem) from error
        if not isinstance(verdict, Keep):
            raise DataError(where, f"returned no rl.Keep: {preview(verdict)}")
        return verdict
