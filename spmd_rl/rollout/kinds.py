"""Kinds of engines: what one does that its config cannot say itself, looked up by that config.

No torch: an engine is imported where it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import DATA
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.options import check_options

if TYPE_CHECKING:
    from spmd_rl.mesh.role_context import RoleContext
    from spmd_rl.model.lora import AdaptedBase
    from spmd_rl.offload.role_memory import RoleMemory

    Decode = Callable[[tuple[int, ...]], str]

EngineConfig = NativeEngineConfig | SglangEngineConfig


@dataclass(frozen=True)
class EngineSite:
    """Where an engine is built: the model folder, its rank, and what else the run tells it.

    `seed` is that of the run; a native engine has one in each request. `reserved_bytes` is the
    memory that the plan counts beside the engine's keys and values. A native engine is in regions
    of `memory`. `adapted` says which adapters the pushed weights are, if they are some. An SGLang
    engine has to know from the first whether it records routes.
    """

    model: str
    context: RoleContext
    decode: Decode
    seed: int
    reserved_bytes: int = 0
    memory: RoleMemory | None = None
    adapted: AdaptedBase | None = None
    records_routes: bool = False


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine. `name` is in sentences, and `advice` for a split with other axes.

    `check_options` raises a ConfigError for settings that do not serve on this host. `build` takes
    the config and an `EngineSite`.
    """

    config: type
    name: str
    axes: tuple[str, ...]
    advice: str
    check_options: Callable[[Any], object]
    build: Callable[[Any, EngineSite], Engine]


def _build_native(cfg: NativeEngineConfig, site: EngineSite) -> Engine:
    from spmd_rl.rollout.native.build import build
    from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks

    context, experts = site.context, None
    if context.placement.axes.get("ep", 1) > 1:
        ranks = context.placement.ranks_along(context.world.rank, ("ep",))
        hosts = {rank // context.world.local_size for rank in ranks}
        experts = ExpertRanks(context.axis_group(("ep",)), len(hosts) == 1)
    return build(
        cfg,
        site.model,
        context.device,
        site.decode,
        site.reserved_bytes,
        site.memory,
        site.adapted,
        experts,
    )


def _build_sglang(cfg: SglangEngineConfig, site: EngineSite) -> Engine:
    from spmd_rl.rollout.sglang.build import build
    from spmd_rl.rollout.sglang.tensor_parallel import TensorParallel

    context = site.context
    return build(
        cfg,
        site.model,
        context.device,
        site.decode,
        rank=context.world.rank,
        seed=site.seed,
        reserved_bytes=site.reserved_bytes,
        records_routes=site.records_routes,
        tp=TensorParallel(
            context.shard_rank,
            context.shard_size,
            context.world.node,
            context.all_gather_in_shard,
        ),
    )


NATIVE = EngineKind(
    NativeEngineConfig,
    name="the native engine",
    axes=(*DATA, "ep"),
    advice='engine.kind = "sglang" has tp',
    check_options=lambda cfg: None,
    build=_build_native,
)
SGLANG = EngineKind(
    SglangEngineConfig,
    name="the SGLang engine",
    axes=(*DATA, "tp"),
    advice="set it to 1",
    check_options=check_options,
    build=_build_sglang,
)
KINDS = (NATIVE, SGLANG)


def kind_of(cfg: EngineConfig) -> EngineKind:
    """Return the kind of an engine. Raises: ConfigError for one of no kind."""
    for kind in KINDS:
        if isinstance(cfg, kind.config):
            return kind
    raise ConfigError(f"engine is a {type(cfg).__name__}, which is no engine")
