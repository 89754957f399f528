"""Memory of the roles that train or are frozen, on one rank: from config, placement and model.

It is computed without torch, for the plan and for the decision what sleeps. Units: bytes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Protocol

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.parts.part import num_own_parts
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.config import FrozenConfig, TrainerConfig, fsdp2_settings
from spmd_rl.train.cost.activation_memory import (
    NO_HEAD,
    Activations,
    HeadShape,
    activations,
    forward_bytes,
)
from spmd_rl.train.cost.adapter_memory import adapter_sizes, merge_bytes, num_adapted
from spmd_rl.train.cost.exchange_memory import exchanging
from spmd_rl.train.cost.expert_memory import expert_elements, split_step_sizes
from spmd_rl.train.cost.step_memory import StepSizes, step_memory
from spmd_rl.train.cost.tensor_memory import own_shapes, sharing, summing, unit_sizes
from spmd_rl.train.optimizer.moment_chunks import CHUNK_ELEMENTS, NUM_SLOTS
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES, moment_bytes, update_rules
from spmd_rl.weights.plan.layout import ITEM_BYTES

NUM_MOMENTS = 2  # AdamW's, the only ones that are offloaded
OFFLOADING_LAYERS = 3  # whose activations are on the GPU while they are copied out and back


class HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


def dtype_on_gpu(cfg: HasDtype) -> str:
    """Return the dtype that a role computes in on a GPU."""
    return "bfloat16" if cfg.dtype == "auto" else cfg.dtype


def fsdp2_memory(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head = "lm"
) -> list[TagBytes]:
    """Return what a trainer of FSDP2 takes of one of its ranks, by tag.

    Raises: ConfigError if the config has another backend.
    """
    offload = fsdp2_settings(cfg).offload
    step = step_memory(step_sizes(spec, cfg, placement, head), offload)
    if not cfg.lora.rank:
        return step
    num_shards = placement.of_shards.axes["fsdp"]
    is_apart = placement.sharding_of_experts(spec.num_experts > 0)
    of_experts = sum(expert_elements(spec)) if is_apart else 0
    others = -(-(spec.num_parameters - of_experts) // num_shards)
    base = (others - (-of_experts // placement.size)) * ITEM_BYTES[dtype_on_gpu(cfg)]
    if not cfg.lora.merged_push:
        return [TagBytes("base", base, "save", changes=False), *step]
    merge = TagBytes("merge", merge_bytes(spec, cfg.lora, num_shards), "fixed")
    return [TagBytes("pushed_base", base, "save", changes=False), merge, *step]


def num_trained_parameters(spec: ModelSpec, cfg: TrainerConfig) -> int:
    """Return how many parameters learn: those of the adapters, or those that are not frozen."""
    if cfg.lora.rank:
        return num_adapted(spec, cfg.lora)
    shapes = spec.trainable_shapes()
    return sum(prod(shapes[name]) for name in update_rules(shapes, cfg, 1))


def step_sizes(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head = "lm"
) -> StepSizes:
    """Return what a trainer of FSDP2 has of each class on one of its ranks, and on the host.

    With `data_parts`, a sum of gradients waits for its neighbour at each level of a tree.
    """
    sizes = _sizes(spec, cfg, placement.of_shards, head)
    if (cp := size_of(placement.axes, "cp")) > 1:
        tp = size_of(placement.axes, "tp")
        sizes = replace(sizes, activations=_activations(spec, cfg, head, cp, tp))
    num_parts = cfg.data_parts // placement.data_size
    num_waiting = num_parts.bit_length() if num_parts > 1 else 0
    return replace(sizes, grads=sizes.grads + num_waiting * sizes.reduced_grads)


def _sizes(spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head) -> StepSizes:
    """Return the sizes where each rank has whole sequences, and one part of the data."""
    num_shards = placement.axes["fsdp"]
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    if cfg.lora.rank:
        return _adapter_step_sizes(spec, cfg, placement)
    if placement.sharding_of_experts(spec.num_experts > 0):
        return _split_step_sizes(spec, cfg, placement, head)
    tp = size_of(placement.axes, "tp")
    shapes = own_shapes(spec, head, tp)
    rules = update_rules(shapes, cfg, num_shards)
    layer, layers, rest = unit_sizes(spec, head, tp)
    num_parameters = layers + rest
    is_one_unit = fsdp2_settings(cfg).gathers_whole(num_parameters * FP32_BYTES)
    unit = num_parameters if is_one_unit else max(layer, rest)
    # One unit, and a model without shards, are gathered until the end of the step, and so long
    # gradients are whole. Otherwise the root's weights and those of two neighbouring layers are
    # there at once.
    is_whole = num_shards == 1 or is_one_unit
    num_gathered = num_parameters if is_whole else min(spec.num_layers, 2) * layer + rest
    # Gathered weights in the dtype of the master, without shards, are the master itself.
    is_copied = num_shards > 1 or element_bytes != FP32_BYTES
    num_trained = sum(prod(shapes[name]) for name in rules)
    reduced = -(-num_trained // num_shards)
    return StepSizes(
        master=-(-num_parameters // num_shards) * FP32_BYTES,
        moments=moment_bytes(shapes, rules, num_shards),
        grads=(num_trained if is_whole else reduced) * FP32_BYTES,
        reduced_grads=reduced * FP32_BYTES,
        gathered=num_gathered * element_bytes if is_copied else 0,
        activations=_activations(spec, cfg, head, tp=tp),
        kept_copies=num_parameters * element_bytes if is_one_unit and num_shards > 1 else 0,
        gather_copies=unit * element_bytes if is_copied else 0,
        layer_copies=_copies(min(layer, unit), num_shards),
        unit_copies=_copies(unit, num_shards),
        chunks=NUM_SLOTS * NUM_MOMENTS * CHUNK_ELEMENTS * FP32_BYTES,
    )


def _split_step_sizes(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head
) -> StepSizes:
    """Return the sizes of a trainer whose ranks share experts."""
    tp, element_bytes = size_of(placement.axes, "tp"), ITEM_BYTES[dtype_on_gpu(cfg)]
    kept = _activations(spec, cfg, head, tp=tp)
    sizes = split_step_sizes(spec, cfg, placement, kept, element_bytes, head)
    return replace(sizes, chunks=NUM_SLOTS * NUM_MOMENTS * CHUNK_ELEMENTS * FP32_BYTES)


def _adapter_step_sizes(spec: ModelSpec, cfg: TrainerConfig, placement: Placement) -> StepSizes:
    """Return the sizes of a trainer whose adapters alone learn; its base is a tag of its own."""
    num_shards, element_bytes = placement.axes["fsdp"], ITEM_BYTES[dtype_on_gpu(cfg)]
    layer, _, rest = unit_sizes(spec, "lm")
    adapted = num_adapted(spec, cfg.lora)
    is_gathered = num_shards > 1  # the base too; FSDP leaves it alone where there is one shard
    unit_bytes = adapted * FP32_BYTES + is_gathered * spec.num_parameters * element_bytes
    is_apart = placement.sharding_of_experts(spec.num_experts > 0)
    is_one_unit = not is_apart and fsdp2_settings(cfg).gathers_whole(unit_bytes)
    num_gathered = spec.num_parameters if is_one_unit else min(spec.num_layers, 2) * layer + rest
    sizes = adapter_sizes(spec, cfg, num_shards, element_bytes, num_gathered)
    of_layer = -(-adapted // spec.num_layers)
    is_whole = is_one_unit or not is_gathered
    return StepSizes(
        master=sizes.master,
        moments=sizes.moments,
        grads=adapted * FP32_BYTES if is_whole else sizes.grads,
        reduced_grads=sizes.grads,
        gathered=sizes.gathered,
        activations=_activations(spec, cfg, "lm"),
        kept_copies=sizes.gathered if is_one_unit and is_gathered else 0,
        layer_copies=_copies(of_layer, num_shards),
        unit_copies=_copies(adapted if is_one_unit else of_layer, num_shards),
    )


def frozen_memory(
    spec: ModelSpec, cfg: FrozenConfig, placement: Placement, head: Head
) -> list[TagBytes]:
    """Return what a model that never learns takes of one of its ranks, by tag.

    Its forward pass has one layer at a time. Its weights change by a push alone, so they are saved
    once.
    """
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    placement = placement.of_shards
    tp, shards = size_of(placement.axes, "tp"), placement.axes["fsdp"]
    layer, layers, rest = unit_sizes(spec, head, tp)
    is_apart = placement.sharding_of_experts(spec.num_experts > 0)
    experts = expert_elements(spec) if is_apart else []
    largest, of_experts = max(experts, default=0), sum(experts)
    others = layers + rest - of_experts
    is_whole = not experts and cfg.gathers_whole(others * element_bytes)
    of_layer = layer - largest - (-largest // size_of(placement.axes, "ep"))
    num_gathered = others if is_whole else min(spec.num_layers, 2) * of_layer + rest
    working = forward_bytes(
        [sharing(block, tp, element_bytes) for block in spec.distinct_blocks()],
        spec.hidden_size,
        _head_shape(spec, cfg, head, keeps_slopes=False, tp=tp),
        num_tokens=cfg.max_tokens,
        element_bytes=element_bytes,
    )
    working += cfg.max_tokens * num_own_parts(spec, tp) * spec.hidden_size * FP32_BYTES
    weights = -(-others // shards) - (-of_experts // placement.size)
    gathered = num_gathered * element_bytes
    # until the first forward pass ends, FSDP keeps what it gathered of one unit twice
    copies = [TagBytes("copies", gathered, "work")] if is_whole and shards > 1 else []
    return [
        TagBytes("weights", weights * element_bytes, "save", changes=False),
        TagBytes("gathered", gathered, "work"),
        *copies,
        TagBytes("activations", working, "work"),
    ]


def _activations(
    spec: ModelSpec, cfg: TrainerConfig, head: Head, cp: int = 1, tp: int = 1
) -> Activations:
    """Return what a micro-batch keeps where `cp` ranks share its tokens, and `tp` each matrix."""
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    settings = fsdp2_settings(cfg)
    offloads, recompute = settings.offload_activations, settings.recompute
    keeps_slopes = dtype_on_gpu(cfg) != "float32" and recompute != "all"
    num_parts = num_own_parts(spec, tp)
    costs = [sharing(one, tp, element_bytes) for one in spec.blocks]
    if cp > 1:
        pairs = zip(costs, spec.blocks, strict=True)
        costs = [exchanging(cost, block.cache(tp)) for cost, block in pairs]
    return activations(
        [summing(one, spec.hidden_size, num_parts, element_bytes) for one in costs],
        spec.hidden_size,
        _head_shape(spec, cfg, head, keeps_slopes, tp),
        num_tokens=cfg.max_tokens,
        element_bytes=element_bytes,
        recompute=recompute,
        num_on_gpu=OFFLOADING_LAYERS if offloads else None,
    )


def _head_shape(
    spec: ModelSpec,
    cfg: TrainerConfig | FrozenConfig,
    head: Head,
    keeps_slopes: bool,
    tp: int = 1,
) -> HeadShape:
    if head == "value":
        return NO_HEAD
    return HeadShape(
        spec.vocab_size, spec.hidden_size, cfg.logit_rows, cfg.max_tokens, keeps_slopes, tp
    )


def _copies(unit: int, num_shards: int) -> int:
    """Return the bytes in which FSDP reduces a unit's gradients.

    They are all of the unit, and a shard of it twice: as it is summed, and divided.
    """
    return (unit + 2 * -(-unit // num_shards)) * FP32_BYTES
