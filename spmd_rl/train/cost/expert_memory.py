"""Memory of a trainer of FSDP2 whose ranks share experts (axis ep), beside `memory.step_sizes`.

What is no expert is sharded along fsdp, and each expert among the ranks that have it. Gathered
experts are float32, and are rounded for a pass. These copies are kept for the backward pass, but
where layers are computed again. Loads are taken as even.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.train.config import TrainerConfig, fsdp2_settings
from spmd_rl.train.cost.activation_memory import Activations
from spmd_rl.train.cost.step_memory import StepSizes
from spmd_rl.train.cost.tensor_memory import own_shapes, unit_sizes
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES, update_rules


@dataclass(frozen=True)
class _Elements:
    """Elements of a part of the model: all, those that are trained, and of the largest layer."""

    all: int
    trained: int
    layer: int


def split_step_sizes(
    spec: ModelSpec,
    cfg: TrainerConfig,
    placement: Placement,
    kept: Activations,
    element_bytes: int,
    head: Head = "lm",
) -> StepSizes:
    """Return what a rank has of each class. `kept` are the activations of a pass."""
    shards, ep = placement.axes["fsdp"], size_of(placement.axes, "ep")
    tp = size_of(placement.axes, "tp")
    others, experts = _parts(spec, cfg, head, tp)
    master = -(-others.all // shards) - (-experts.all // placement.size)
    trained = -(-others.trained // shards) - (-experts.trained // placement.size)
    is_whole = shards == 1  # all is gathered until the end of the step
    _, _, outside = unit_sizes(spec, head, tp)
    near = min(spec.num_layers, 2) * others.layer + outside
    unit = max(others.layer, outside)
    is_copied = shards > 1 or element_bytes != FP32_BYTES
    # the gradients of a layer's experts for the rows of each source, and their sums
    summed = experts.layer * (element_bytes + FP32_BYTES) + -(-experts.layer // ep) * FP32_BYTES
    gathered = (others.all if is_whole else near) * element_bytes if is_copied else 0
    whole_grads = others.trained - (-experts.trained // ep)
    return StepSizes(
        master=master * FP32_BYTES,
        moments=2 * trained * FP32_BYTES,
        grads=(whole_grads if is_whole else trained) * FP32_BYTES,
        reduced_grads=trained * FP32_BYTES,
        gathered=gathered + _gathered_experts(spec, cfg, placement, experts, element_bytes),
        activations=kept,
        gather_copies=unit * element_bytes if is_copied else 0,
        layer_copies=summed + _copies(others.layer, shards),
        unit_copies=_copies(unit, shards),
    )


def _gathered_experts(
    spec: ModelSpec,
    cfg: TrainerConfig,
    placement: Placement,
    experts: _Elements,
    element_bytes: int,
) -> int:
    """Return the bytes of experts that are gathered, and of their rounded copies."""
    ep, copies = (size_of(placement.axes, axis) for axis in ("ep", "edp"))
    own, of_layer = -(-experts.all // ep), -(-experts.layer // ep)
    near = own if placement.axes["fsdp"] == 1 else min(spec.num_layers, 2) * of_layer
    gathered = near * FP32_BYTES if copies > 1 else 0
    if element_bytes == FP32_BYTES:
        return gathered
    rounded = of_layer if fsdp2_settings(cfg).recompute == "all" else own
    return gathered + rounded * element_bytes


def expert_elements(spec: ModelSpec) -> list[int]:
    """Return the elements of the experts of each block."""
    of_block = {
        block: sum(
            tensor.num_elements for tensor in block.parameters() if tensor.expert is not None
        )
        for block in spec.distinct_blocks()
    }
    return [of_block[block] for block in spec.blocks]


@lru_cache(maxsize=64)  # a plan asks again for each layout
def _parts(spec: ModelSpec, cfg: TrainerConfig, head: Head, tp: int) -> tuple[_Elements, _Elements]:
    """Return the elements of all but experts, of which `tp` ranks share each matrix, and of
    experts.
    """
    largest = [0, 0]
    for block in spec.distinct_blocks():
        own = block.part(tp) if tp > 1 else block
        sizes = [0, 0]
        for tensor in own.parameters():
            sizes[tensor.expert is not None] += tensor.num_elements
        largest = [max(pair) for pair in zip(largest, sizes, strict=True)]
    of_experts = spec.expert_parts(1)
    shapes = own_shapes(spec, head, tp)
    rules = update_rules(shapes, cfg, 1)
    elements = []
    for is_expert in (False, True):
        names = [name for name in shapes if (name in of_experts) == is_expert]
        trained = sum(prod(shapes[name]) for name in names if name in rules)
        every = sum(prod(shapes[name]) for name in names)
        elements.append(_Elements(every, trained, largest[is_expert]))
    others, experts = elements
    return others, experts


def _copies(unit: int, num_shards: int) -> int:
    """Return the bytes in which FSDP reduces a unit's gradients, as in `memory.py`."""
    return (unit + 2 * -(-unit // num_shards)) * FP32_BYTES
