"""Memory of attention whose ranks share tokens (axis cp of FSDP2), beside what a layer says. Pure.

A rank has as many tokens times heads after the exchange as before. Attention keeps what it received
for its backward pass, so that recomputation of cheap operations saves nothing there. Its output is
kept twice: as heads, and as the tokens that the next product reads.
"""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.model.layers.layer import CacheSpec, LayerCost


def exchanging(cost: LayerCost, cache: CacheSpec | None) -> LayerCost:
    """Return the cost of a block, and that of the exchanges around its attention.

    `cache` is that of the heads of which `cost` is.
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
