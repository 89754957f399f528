"""From an engine's config to the engine of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.lora import AdaptedBase
from spmd_rl.rollout.engine import Engine, NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig

NO_ADAPTERS = (
    'engine.kind = "sglang" takes no adapters: set trainer.lora.merged_push = true, so that a push '
    'brings whole weights, or engine.kind = "native"'
)

if TYPE_CHECKING:
    from spmd_rl.offload.role_memory import RoleMemory

    Decode = Callable[[tuple[int, ...]], str]


def build_engine(
    cfg: NativeEngineConfig | SglangEngineConfig,
    model: str,
    context: RoleContext,
    decode: Decode,
    *,
    seed: int,
    reserved_bytes: int = 0,
    memory: RoleMemory | None = None,
    adapted: AdaptedBase | None = None,
) -> Engine:
    """Return the engine of `cfg.kind` for the model folder, on this rank's device.

    `seed` is that of the run; a native engine has one in each request. `reserved_bytes` is the
    memory that the plan counts beside the engine's keys and values. A native engine is in regions
    of `memory`. `adapted` says which adapters the pushed weights are, if they are some.
    Raises: ConfigError for adapters beside an engine that takes none.
    """
    if adapted is not None and isinstance(cfg, SglangEngineConfig):
        raise ConfigError(NO_ADAPTERS)
    if isinstance(cfg, SglangEngineConfig):
        from spmd_rl.rollout.sglang.build import build as build_sglang
        from spmd_rl.rollout.sglang.tensor_parallel import TensorParallel

        return build_sglang(
            cfg,
            model,
            context.device,
            decode,
            rank=context.world.rank,
            seed=seed,
            reserved_bytes=reserved_bytes,
            tp=TensorParallel(
                context.shard_rank,
                context.shard_size,
                context.world.node,
                context.all_gather_in_shard,
            ),
        )
    from spmd_rl.rollout.native.build import build as build_native

    return build_native(cfg, model, context.device, decode, reserved_bytes, memory, adapted)
