"""From an engine's config to the engine of its kind."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.kinds import EngineConfig, EngineSite, kind_of

NO_ADAPTERS = (
    'engine.kind = "sglang" takes no adapters: set trainer.lora.merged_push = true, so that a push '
    'brings whole weights, or engine.kind = "native"'
)


def build_engine(cfg: EngineConfig, site: EngineSite) -> Engine:
    """Return the engine of `cfg.kind` for the model folder, on this rank's device.

    Raises: ConfigError for adapters beside an engine that takes none.
    """
    if site.adapted is not None and not cfg.takes_adapters:
        raise ConfigError(NO_ADAPTERS)
    return kind_of(cfg).build(cfg, site)
