"""From an engine's config to the engine of its kind."""

from __future__ import annotations

from spmd_rl.config.combinations import refuse
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.kinds import EngineConfig, EngineSite, kind_of


def build_engine(cfg: EngineConfig, site: EngineSite) -> Engine:
    """Return the engine of `cfg.kind` for the model folder, on this rank's device.

    Raises: ConfigError for adapters beside an engine that takes none, or a model that it does not
    compute.
    """
    kind = kind_of(cfg)
    impl = read_spec(site.model).impl
    refuse(kind.refused, {"trainer": site.adapted, "engine": cfg, "model.impl": impl})
    return kind.build(cfg, site)
