"""Clock skew between all ranks, measured through torchrun's store."""

from __future__ import annotations

import time

from spmd_rl.check.facts import ClockSkew
from spmd_rl.mesh.world import World, open_store


def rank_skew(world: World) -> ClockSkew:
    """Return the largest difference between the clocks of two ranks.

    Every rank reads its clock once all have arrived. The time that the store takes to say so counts
    as skew.
    Ranks: all.
    Blocks: until every rank has arrived; raises after the store's timeout.
    """
    store = open_store(world)
    if store.add("check/arrived", 1) == world.size:
        store.set("check/all", "yes")
    store.wait(["check/all"])
    store.set(f"check/clock/{world.rank}", repr(time.time()))
    clocks = [float(store.get(f"check/clock/{rank}")) for rank in range(world.size)]
    if store.add("check/left", 1) == world.size:
        store.set("check/done", "yes")
    store.wait(
        ["check/done"]
    )  # the store may live in a rank, which must not end before all have read
    return spread(clocks)


def spread(clocks: list[float]) -> ClockSkew:
    """Return the largest difference between two of these readings, by rank."""
    early, late = min(clocks), max(clocks)
    return ClockSkew(
        late - early, f"rank {clocks.index(early)} to rank {clocks.index(late)} of {len(clocks)}"
    )
