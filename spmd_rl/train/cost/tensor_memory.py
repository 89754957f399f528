"""Memory of a model whose matrices ranks share (axis tp of FSDP2), on one of them. Pure.

The first rank has no less than the others. Between layers a rank has its part of the tokens, and
before a layer it gathers them all, which that layer keeps. Sums over ranks are of float32, of which
there are the rank's own and what it received. A model that sums in parts has these parts before.
"""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.model.held.held import TRAINER, parts
from spmd_rl.model.held.tensor import Along
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.layer import Dims, LayerCost, num_elements
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.weights.plan.layout import ITEM_BYTES

SUMS = 2  # of float32 that exist at once, in a forward and in a backward pass
GATHERED = 2  # inputs of the two layers of a block, where one rank keeps those of its norms


def own_shapes(spec: ModelSpec, head: Head, tp: int) -> dict[str, Dims]:
    """Return the shape of every parameter of a rank that an optimizer may change, by name."""
    shapes = spec.trainable_shapes(head)
    if tp == 1:
        return shapes
    boxes = parts(spec, Along(0, tp), TRAINER, head)
    return {name: boxes[name].extent for name in shapes}


def unit_sizes(spec: ModelSpec, head: Head, tp: int = 1) -> tuple[int, int, int]:
    """Return a rank's parameters of the largest layer, of all layers, and of those outside."""
    layers = [block.cost().parameters for block in ModelPart(0, tp).spec(spec).blocks]
    outer = spec.outer_parameters(head)
    if tp == 1:
        return max(layers), sum(layers), num_elements(outer)
    boxes = parts(spec, Along(0, tp), TRAINER, head)
    return max(layers), sum(layers), sum(boxes[one.name].num_elements for one in outer)


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
