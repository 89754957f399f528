"""Kinds of engines: what one does that its config cannot say itself, looked up by that config.

No torch: an engine is imported where it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmd_rl.config.combinations import Combination, refuse
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import DATA
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.parts.part import ModelPart, check_parts
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.plain.config import PlainEngineConfig
from spmd_rl.rollout.refusals import IN_PARTS, NATIVE_REFUSED, PLAIN_REFUSED, SGLANG_REFUSED
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.options import check_options
from spmd_rl.rollout.sglang.tensor_parallel import check_sizes, shard_boxes
from spmd_rl.weights.plan.layout import Box

if TYPE_CHECKING:
    from spmd_rl.mesh.role_context import RoleContext
    from spmd_rl.model.lora import AdaptedBase
    from spmd_rl.offload.role_memory import RoleMemory

    Decode = Callable[[tuple[int, ...]], str]

EngineConfig = NativeEngineConfig | SglangEngineConfig | PlainEngineConfig


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

    `refused` has what does not go together with this engine. `check_options` raises a ConfigError
    for settings that do not serve on this host. `build` takes the config and an `EngineSite`.
    `check_tp` raises a ConfigError for a model that so many ranks cannot share, and `boxes` returns
    what a rank of so many has of each tensor.
    """

    config: type
    name: str
    axes: tuple[str, ...]
    advice: str
    refused: tuple[Combination, ...]
    check_options: Callable[[Any], object]
    build: Callable[[Any, EngineSite], Engine]
    check_tp: Callable[[ModelSpec, int], None]
    boxes: Callable[[ModelSpec, int, int], Mapping[str, Box]]


def _build_native(cfg: NativeEngineConfig, site: EngineSite) -> Engine:
    from spmd_rl.rollout.native.build import build
    from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
    from spmd_rl.rollout.native.tp.build import part_of, shared

    context, experts = site.context, None
    if context.placement.axes.get("ep", 1) > 1:
        ranks = context.placement.ranks_along(context.world.rank, ("ep",))
        experts = ExpertRanks(context.axis_group(("ep",)), context.world.has_one_host(ranks))
    is_mixture = read_spec(site.model).num_experts > 0
    part = part_of(context, records=cfg.cuda_graphs and not is_mixture)
    row_shards = max(context.row_shards, part.count)
    settings = {"engine": cfg, "trainer": site.adapted, "run": {"row_shards": row_shards}}
    refuse(IN_PARTS, settings)
    engine = build(
        cfg,
        site.model,
        context.device,
        site.decode,
        site.reserved_bytes,
        site.memory,
        site.adapted,
        experts,
        part,
        row_shards,
    )
    return shared(engine)


def _check_native_tp(spec: ModelSpec, size: int) -> None:
    at = f"split.infer.tp = {size}"
    check_parts(spec, size, at)
    if spec.num_experts and size > 1:
        check_shares(spec, size, at)


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


def _build_plain(cfg: PlainEngineConfig, site: EngineSite) -> Engine:
    from spmd_rl.rollout.plain.engine import PlainEngine

    return PlainEngine(cfg, site.model, site.context.device, site.decode)


NATIVE = EngineKind(
    NativeEngineConfig,
    name="the native engine",
    axes=(*DATA, "tp", "ep"),
    advice="set it to 1",
    refused=NATIVE_REFUSED,
    check_options=lambda cfg: None,
    build=_build_native,
    check_tp=_check_native_tp,
    boxes=lambda spec, rank, size: ModelPart(rank, size).boxes(spec),
)
SGLANG = EngineKind(
    SglangEngineConfig,
    name="the SGLang engine",
    axes=(*DATA, "tp"),
    advice="set it to 1",
    refused=SGLANG_REFUSED,
    check_options=check_options,
    build=_build_sglang,
    check_tp=check_sizes,
    boxes=shard_boxes,
)
PLAIN = EngineKind(
    PlainEngineConfig,
    name="the plain engine",
    axes=DATA,
    advice="set it to 1",
    refused=PLAIN_REFUSED,
    check_options=lambda cfg: None,
    build=_build_plain,
    check_tp=lambda spec, size: None,
    boxes=lambda spec, rank, size: {},
)
KINDS = (NATIVE, SGLANG, PLAIN)


def kind_of(cfg: EngineConfig) -> EngineKind:
    """Return the kind of an engine. Raises: ConfigError for one of no kind."""
    for kind in KINDS:
        if isinstance(cfg, kind.config):
            return kind
    raise ConfigError(f"engine is a {type(cfg).__name__}, which is no engine")
