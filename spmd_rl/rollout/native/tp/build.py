"""From the site of a native engine to the part of the model that its rank has, and its engine."""

from __future__ import annotations

from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.tp.follower import TpFollower
from spmd_rl.rollout.native.tp.leader import TpLeader


def part_of(context: RoleContext, *, records: bool) -> ModelPart:
    """Return this rank's part of the model.

    If the engine `records` its steps, ranks add by memory of GPUs of one host, where they can. An
    engine of a mixture does not: the host waits to hear how many rows go to which experts.
    Ranks: all of the role. Blocks: there, until all ranks of this engine have called.
    """
    if context.placement.axes.get("tp", 1) == 1:
        return WHOLE
    ranks = context.placement.ranks_along(context.world.rank, ("tp",))
    can_map = context.device.type == "cuda" and context.world.has_one_host(ranks)
    exchange = SymmExchange if records and can_map else TorchExchange
    group = context.axis_group(("tp",))
    return ModelPart(context.shard_rank, context.shard_size, exchange(group))


def shared(engine: NativeEngine) -> NativeEngine | TpLeader | TpFollower:
    """Return the engine of this rank, among those that share its model."""
    part = engine.model.part
    if part.count == 1:
        return engine
    return TpFollower(engine) if part.index else TpLeader(engine)
