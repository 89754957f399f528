"""Constructor of a role as `spawn` uses it: its keyword arguments after config and context.

    class Judge(Role):
        def __init__(self, cfg: JudgeConfig, context: RoleContext, model: str) -> None: ...

    judge = ctl.spawn(Judge, cfg.judge, on=roles.judge, model=cfg.model)

The arguments travel to the ranks like those of an endpoint, by the types in the signature.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from spmd_rl.controller.config_codec import ConfigCodec
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import ConfigError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Constructor:
    """The parameters of a role's `__init__` after `cfg` and `context`."""

    def __init__(self, role: type[Role]) -> None:
        self._role = role
        parameters = list(inspect.signature(role).parameters.values())[2:]
        self._defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.kind in _NAMED
        }
        self.names = tuple(self._defaults)

    def arguments(
        self, settings: Mapping[str, Any], planned: Mapping[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Return a value for each of `names`: from `settings`, else `planned`, else its default.

        A role may have no parameter for a name in `planned`.
        Raises: ConfigError for a setting that the role does not have, or one that is missing.
        """
        role = self._role.__name__
        for name in settings:
            if name not in self.names:
                takes = ", ".join(self.names) or "none"
                raise ConfigError(f"{role} has no setting '{name}'; those it has: {takes}")
        values = self._defaults | dict(planned or {}) | dict(settings)
        for name in self.names:
            if values[name] is inspect.Parameter.empty:
                raise ConfigError(f"{role} needs the setting '{name}': pass it to spawn")
        return tuple(values[name] for name in self.names)

    def codec(self, cfg_type: type) -> ConfigCodec:
        """Return the codec of config and arguments, as one tuple.

        Raises: ConfigError when a parameter has no type.
        """
        hints = self._hints() if self.names else {}
        return ConfigCodec(cfg_type, [hints[name] for name in self.names])

    def _hints(self) -> dict[str, Any]:
        where = f"{self._role.__name__}.__init__"
        try:
            hints = typing.get_type_hints(self._role.__init__, include_extras=True)
        except NameError as error:
            raise ConfigError(
                f"{where}: {error}: import its types outside of TYPE_CHECKING"
            ) from error
        for name in self.names:
            if name not in hints:
                raise ConfigError(
                    f"{where}: parameter '{name}' needs a type, since it crosses to workers"
                )
        return hints
