"""Memory of layers whose matrices or tokens ranks share (axes tp and cp of FSDP2), on one. Pure.

Along tp, between layers a rank has its part of the tokens, and
before a layer it gathers them all, which that layer keeps. Sums over ranks are of float32, of which
there are the rank's own and what it received. A model that sums in parts has these parts before.
"""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.layer import CacheSpec, LayerCost
from spmd_rl.weights.plan.layout import ITEM_BYTES

SUMS = 2  # of float32 that exist at once, in a forward and in a backward pass
GATHERED = 2  # inputs of the two layers of a block, where one rank keeps those of its norms


def summing(cost: LayerCost, hidden_size: int, num_parts: int, element_bytes: int) -> LayerCost:
    """Return the cost of a block whose sums are of so many fp32 parts.

    They are there at once in its forward pass, before any gradient.
    """
    parts = num_parts * hidden_size * ITEM_BYTES["float32"] // element_bytes
    return replace(cost, gradients=max(cost.gradients, parts), workspace=cost.workspace + parts)


def sharing(block: BlockSpec, tp: int, element_bytes: int) -> LayerCost:
    """Return the cost of a block on one of `tp` ranks, and that of their sums."""
    cost = block.cost(tp)
    if tp == 1:
        return cost
    hidden = block.hidden_size
    sums = SUMS * hidden * ITEM_BYTES["float32"] // element_bytes
    return replace(
        cost,
        kept_inputs=-(-cost.kept_inputs // tp),
        kept_products=cost.kept_products + GATHERED * hidden,
        kept_cheap=cost.kept_cheap - GATHERED * hidden,
        gradients=cost.gradients + sums,
        workspace=cost.workspace + sums,
    )


def exchanging(cost: LayerCost, cache: CacheSpec | None) -> LayerCost:
    """Return the cost of a block, and that of the exchanges around its attention, where ranks share
    tokens (axis cp of FSDP2).

    A rank has as many tokens times heads after the exchange as before. Attention keeps what it
    received for its backward pass, so that recomputation of cheap operations saves nothing there.
    Its output is kept twice: as heads, and as the tokens that the next product reads. `cache` is
    that of the heads of which `cost` is.
    """
    if cache is None:
        return cost
    keys = cache.num_elements // 2
    queries = keys * cache.queries_per_key
    sent = queries + 2 * keys
    return replace(
        cost,
        kept_products=cost.kept_products + 2 * queries + keys,
        kept_cheap=cost.kept_cheap - queries - keys,
        gradients=cost.gradients + 2 * sent,
        workspace=cost.workspace + 2 * sent,
    )
