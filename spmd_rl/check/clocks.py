"""The clocks of all ranks against each other, by torchrun's own store."""

from __future__ import annotations

import time

from spmd_rl.check.facts import ClockSkew
from spmd_rl.mesh.world import World, open_store


def rank_skew(world: World) -> ClockSkew:
    """How far the clocks of the world's ranks are apart, at most.

    Every rank reads its clock when the last one has come; how long the store takes to tell them
    counts as skew.
    Ranks: all.
    Blocks: until every rank has come; raises after the store's timeout.
    """
    store = open_store(world)
    if store.add("check/came", 1) == world.size:
        store.set("check/all", "come")
    store.wait(["check/all"])
    store.set(f"check/clock/{world.rank}", repr(time.time()))
    clocks = [float(store.get(f"check/clock/{rank}")) for rank in range(world.size)]
    if store.add("check/left", 1) == world.size:
        store.set("check/done", "left")
    store.wait(["check/done"])  # the store may live in a rank: it must not go before all have read
    return spread(clocks)


def spread(clocks: list[float]) -> ClockSkew:
    """The widest gap between two of these readings."""
    early, late = min(clocks), max(clocks)
    return ClockSkew(
        late - early, f"rank {clocks.index(early)} to rank {clocks.index(late)} of {len(clocks)}"
    )
