"""News of a tensor-parallel engine on their way from its first rank to the others."""

from __future__ import annotations

from typing import Any

from spmd_rl.controller.turns.shard_turns import ShardTurns
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.native.tp.follower import TpFollower
from spmd_rl.rollout.native.tp.leader import TpLeader


def share_news(engine: Engine, turns: ShardTurns[Any], steps: bool) -> bool:
    """Return whether this rank's engine is to step now; `steps` says so of one that is alone.

    Ranks: all that share the engine. Blocks: until the others are told, or tell.
    """
    if isinstance(engine, TpLeader):
        turns.tell(engine.news(steps))
    elif isinstance(engine, TpFollower):
        if (news := turns.hear()) is not None:
            engine.follow(news)
        return True  # what was submitted here ends
    return steps
