"""Constructor of a role as `spawn` uses it: its keyword arguments after config and context.

    class Judge(Role):
        def __init__(self, cfg: JudgeConfig, context: RoleContext, model: str) -> None: ...

    judge = ctl.spawn(Judge, cfg.judge, on=roles.judge, model=cfg.model)

The arguments travel to the ranks like those of an endpoint, by the types in the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.config.load import from_data
from spmd_rl.config.schema import table_classes, type_hints
from spmd_rl.controller.channel.codec import Codec, Packed
from spmd_rl.controller.endpoint import Role, wire_types
from spmd_rl.errors import ConfigError, ContractError

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
        where = f"{self._role.__name__}.__init__"
        hints = wire_types(self._role.__init__, where) if self.names else {}
        for name in self.names:
            if name not in hints:
                raise ConfigError(
                    f"{where}: parameter '{name}' needs a type, since it crosses to workers"
                )
        return ConfigCodec(cfg_type, [hints[name] for name in self.names])


class ConfigCodec:
    """Decodes a config of class `cfg_type`, and settings of `types` after it.

    The decoder of the wire takes no union of config classes, as that of `TrainerConfig.backend` is.
    A config that has one is decoded to plain data first, which is then read as a file's is.
    """

    def __init__(self, cfg_type: type, types: Sequence[Any]) -> None:
        self._cfg_type = cfg_type
        self._is_plain = not _has_kinds(cfg_type)
        annotation = (cfg_type if self._is_plain else dict[str, Any], *types)
        self._codec = Codec(tuple[annotation])  # type: ignore[valid-type]

    def unpack(self, packed: Packed) -> tuple[Any, ...]:
        """Return config and settings.

        Raises: ContractError saying where the value does not fit.
        """
        config, *settings = self._codec.unpack(packed)
        if self._is_plain:
            return (config, *settings)
        try:
            return (from_data(self._cfg_type, config), *settings)
        except ConfigError as error:
            raise ContractError(f"{self._cfg_type.__name__}: {error}") from error


def _has_kinds(cls: type) -> bool:
    """Return whether a config class has a field of several classes, at any depth."""
    tables = [table_classes(hint) for hint in type_hints(cls).values()]
    return any(len(classes) > 1 or any(map(_has_kinds, classes)) for classes in tables)
