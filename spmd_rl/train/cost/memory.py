"""Memory of the roles that train or are frozen, on one rank: from config, placement and model.

It is computed without torch, for the plan and for the decision what sleeps. Units: bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.parts.part import num_own_parts
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.config import FrozenConfig, Fsdp2Config, TrainerConfig, fsdp2_settings
from spmd_rl.train.cost.activation_memory import (
    NO_HEAD,
    Activations,
    HeadShape,
    activations,
    forward_bytes,
)
from spmd_rl.train.cost.parts import (
    PartSize,
    both_parts,
    merge_bytes,
    of_layers,
    sharded_parts,
)
from spmd_rl.train.cost.step_memory import StepSizes, step_memory
from spmd_rl.train.cost.tensor_memory import exchanging, sharing, summing
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES
from spmd_rl.weights.plan.layout import ITEM_BYTES

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
    are_apart = _are_experts_apart(spec, placement)
    of_experts = of_layers(spec, "lm", experts=True).all if are_apart else 0
    others = -(-(spec.num_parameters - of_experts) // num_shards)
    base = (others - (-of_experts // placement.size)) * ITEM_BYTES[dtype_on_gpu(cfg)]
    if not cfg.lora.merged_push:
        return [TagBytes("base", base, "save", changes=False), *step]
    merge = TagBytes("merge", merge_bytes(spec, cfg.lora, num_shards), "fixed")
    return [TagBytes("pushed_base", base, "save", changes=False), merge, *step]


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
    """Return the sizes where each rank has whole sequences, and one part of the data.

    Where ranks share experts, what is no expert is sharded along fsdp, and each expert among the
    ranks that have it. Gathered experts are float32, and are rounded for a pass. These copies are
    kept for the backward pass, but where layers are computed again. Loads are taken as even.
    """
    ep, settings = size_of(placement.axes, "ep"), fsdp2_settings(cfg)
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    others, experts = _parts(spec, cfg, placement, head)
    shards = others.num_shards
    # beside adapters FSDP gathers the base too, but where there is one shard
    base = of_layers(spec, "lm") if cfg.lora.rank and shards > 1 else PartSize()
    unit_bytes = others.all * FP32_BYTES + base.all * element_bytes
    is_one_unit = _is_one_unit(spec, settings, placement, unit_bytes)
    unit = others.all if is_one_unit else max(others.layer, others.outside)
    # One unit, and a model without shards, are gathered until the end of the step, and so long
    # gradients are whole. Otherwise the root's weights and those of two neighbouring layers are
    # there at once.
    is_whole = shards == 1 or is_one_unit
    gathered = others.gathered(is_whole or cfg.lora.rank > 0, spec.num_layers)
    gathered += base.gathered(is_one_unit, spec.num_layers)
    # Gathered weights in the dtype of the master, without shards, are the master itself.
    is_copied = shards > 1 or element_bytes != FP32_BYTES
    gathered_bytes = gathered * element_bytes if is_copied else 0
    return StepSizes(
        master=(others.shard + experts.shard) * FP32_BYTES,
        moments=others.moments + experts.moments,
        grads=_gradients(others, experts, ep, is_whole),
        reduced_grads=_gradients(others, experts, ep, False),
        gathered=gathered_bytes
        + _gathered_experts(spec, settings, placement, experts, element_bytes),
        activations=_activations(spec, cfg, head, tp=size_of(placement.axes, "tp")),
        kept_copies=gathered_bytes if is_one_unit and shards > 1 else 0,
        gather_copies=unit * element_bytes if is_copied and not cfg.lora.rank else 0,
        layer_copies=_summed(experts, ep, element_bytes) + _copies(others.layer, shards),
        unit_copies=_copies(unit, shards),
    )


def frozen_memory(
    spec: ModelSpec, cfg: FrozenConfig, placement: Placement, head: Head
) -> list[TagBytes]:
    """Return what a model that never learns takes of one of its ranks, by tag.

    Its forward pass has one layer at a time. Its weights change by a push alone, so they are saved
    once.
    """
    element_bytes, placement = ITEM_BYTES[dtype_on_gpu(cfg)], placement.of_shards
    tp, shards = size_of(placement.axes, "tp"), placement.axes["fsdp"]
    others, experts = both_parts(spec, head, tp, _are_experts_apart(spec, placement))
    is_whole = not experts.all and cfg.gathers_whole(others.all * element_bytes)
    of_experts = -(-experts.layer // size_of(placement.axes, "ep"))
    num_gathered = others.gathered(is_whole, spec.num_layers)
    num_gathered += min(spec.num_layers, 2) * of_experts
    working = forward_bytes(
        [sharing(block, tp, element_bytes) for block in spec.distinct_blocks()],
        spec.hidden_size,
        _head_shape(spec, cfg, head, keeps_slopes=False, tp=tp),
        num_tokens=cfg.max_tokens,
        element_bytes=element_bytes,
    )
    working += cfg.max_tokens * num_own_parts(spec, tp) * spec.hidden_size * FP32_BYTES
    weights = -(-others.all // shards) - (-experts.all // placement.size)
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
    costs = {block: sharing(block, tp, element_bytes) for block in spec.distinct_blocks()}
    if cp > 1:
        costs = {block: exchanging(cost, block.cache(tp)) for block, cost in costs.items()}
    costs = {
        block: summing(cost, spec.hidden_size, num_parts, element_bytes)
        for block, cost in costs.items()
    }
    return activations(
        [costs[block] for block in spec.blocks],
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


def _gradients(others: PartSize, experts: PartSize, ep: int, are_whole: bool) -> int:
    """Return the gradients of a rank, before or after they are reduced."""
    if are_whole:
        return (others.trained - (-experts.trained // ep)) * FP32_BYTES
    return (others.trained_shard + experts.trained_shard) * FP32_BYTES


def _summed(experts: PartSize, ep: int, element_bytes: int) -> int:
    """Return the gradients of a layer's experts for the rows of each source, and their sums."""
    return experts.layer * (element_bytes + FP32_BYTES) + -(-experts.layer // ep) * FP32_BYTES


def _gathered_experts(
    spec: ModelSpec,
    settings: Fsdp2Config,
    placement: Placement,
    experts: PartSize,
    element_bytes: int,
) -> int:
    """Return the bytes of experts that are gathered, and of their rounded copies."""
    ep, copies = (size_of(placement.axes, axis) for axis in ("ep", "edp"))
    own, of_layer = -(-experts.all // ep), -(-experts.layer // ep)
    near = own if placement.axes["fsdp"] == 1 else min(spec.num_layers, 2) * of_layer
    gathered = near * FP32_BYTES if copies > 1 else 0
    if element_bytes == FP32_BYTES:
        return gathered
    rounded = of_layer if settings.recompute == "all" else own
    return gathered + rounded * element_bytes


def _parts(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head
) -> tuple[PartSize, PartSize]:
    """Return the parts of a model that are sharded alike: all but shared experts, and these."""
    rules = TrainerConfig(
        optimizer=cfg.optimizer, freeze=cfg.freeze, groups=cfg.groups, lora=cfg.lora
    )
    shared = not cfg.lora.rank and _are_experts_apart(spec, placement)
    shards = placement.axes["fsdp"], placement.size if shared else 1
    return sharded_parts(spec, rules, head, size_of(placement.axes, "tp"), shards, shared)


def _are_experts_apart(spec: ModelSpec, placement: Placement) -> bool:
    """Return whether experts are sharded among other ranks than all else."""
    return placement.sharding_of_experts(spec.num_experts > 0) != ""


def _is_one_unit(
    spec: ModelSpec, settings: Fsdp2Config, placement: Placement, unit_bytes: int
) -> bool:
    """Return whether all of a model is gathered at once, which experts apart never are."""
    return not _are_experts_apart(spec, placement) and settings.gathers_whole(unit_bytes)


def _copies(unit: int, num_shards: int) -> int:
    """Return the bytes in which FSDP reduces a unit's gradients.

    They are all of the unit, and a shard of it twice: as it is summed, and divided.
    """
    return (unit + 2 * -(-unit // num_shards)) * FP32_BYTES
