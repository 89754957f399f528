"""Memory of models that train or are frozen: the ledger of one rank, from config and placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.ledger import (
    FP32_BYTES,
    Entry,
    Ledger,
    activation_bytes,
    frozen_ledger,
    trainer_ledger,
)
from spmd_rl.plan.step_memory import StepSizes, step_ledger
from spmd_rl.train.adapter_memory import adapter_sizes
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.moment_chunks import CHUNK_ELEMENTS, NUM_SLOTS
from spmd_rl.train.parameter_groups import moment_bytes, update_rules
from spmd_rl.weights.layout import ITEM_BYTES

NUM_MOMENTS = 2  # AdamW's, the only ones that are offloaded
OFFLOADING_LAYERS = 3  # whose activations are on the GPU while they are copied out and back


class _HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class PlannedRole:
    """A role that a recipe spawns besides its trainer and its engine, with its model's shapes."""

    name: str
    cfg: TrainerConfig | FrozenConfig
    placement: Placement
    spec: ModelSpec
    head: Head
    is_refreshed: bool

    def ledger(self) -> Ledger:
        """Return the memory of the role on one of its ranks."""
        if isinstance(self.cfg, TrainerConfig):
            return trainer_memory(self.spec, self.cfg, self.placement, self.head)
        return _frozen_memory(self.spec, self.cfg, self.placement, self.head)


def dtype_on_gpu(cfg: _HasDtype) -> str:
    """Return the dtype that a role computes in on a GPU."""
    return "bfloat16" if cfg.dtype == "auto" else cfg.dtype


def exchanges(cfg: TrainerConfig | FrozenConfig) -> bool:
    """Return whether a train step sends rows of gradients or weights to each rank that shards."""
    if isinstance(cfg, FrozenConfig):
        return False
    return cfg.deterministic or cfg.optimizer.kind == "muon"


def trainer_memory(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head = "lm"
) -> Ledger:
    """Return the ledger of a trainer on one of its ranks."""
    if cfg.backend.offload == "none":
        return _without_offload(spec, cfg, placement, head)
    return step_ledger(step_sizes(spec, cfg, placement, head), cfg.backend.offload)


def step_sizes(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head = "lm"
) -> StepSizes:
    """Return what a trainer has of each class on one of its ranks, on the GPU and on the host."""
    plain = _without_offload(spec, cfg, placement, head)
    layer, rest = _unit_sizes(spec, head)
    unit = layer * spec.num_layers + rest if _is_one_unit(spec, cfg, placement, head) else rest
    host_layers = spec.num_layers - 1 if cfg.backend.offload_activations else 0
    return StepSizes(
        **{entry.tag: entry.num_bytes for entry in plain.entries},
        layer_copies=_copies(min(layer, unit), placement.axes["fsdp"]),
        unit_copies=_copies(max(layer, unit), placement.axes["fsdp"]),
        chunks=NUM_SLOTS * NUM_MOMENTS * CHUNK_ELEMENTS * FP32_BYTES,
        kept=_activation_bytes(spec, cfg, head, 1 + host_layers)
        - _activation_bytes(spec, cfg, head, 1),
    )


def _without_offload(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head
) -> Ledger:
    """Return the ledger of a trainer whose moments and master weights stay on the GPU."""
    if cfg.lora.rank:
        return _adapter_ledger(spec, cfg, placement)
    num_shards = placement.axes["fsdp"]
    shapes = spec.parameter_shapes(head)
    num_parameters = _num_parameters(spec, head)
    rules = update_rules(shapes, cfg, num_shards)
    # Without shards the gathered weights are kept until the end of the step.
    is_whole = num_shards == 1 or _is_one_unit(spec, cfg, placement, head)
    return trainer_ledger(
        num_parameters,
        num_shards,
        ITEM_BYTES[dtype_on_gpu(cfg)],
        num_trained=sum(prod(shapes[name]) for name in rules),
        moments=moment_bytes(shapes, rules, num_shards),
        num_gathered=num_parameters if is_whole else _num_gathered(spec, head),
        activations=_activation_bytes(spec, cfg, head, _num_layers_on_gpu(spec, cfg)),
    )


def _adapter_ledger(spec: ModelSpec, cfg: TrainerConfig, placement: Placement) -> Ledger:
    """Return the ledger of a trainer whose adapters alone learn."""
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    is_one_unit = cfg.backend.gathers_whole(
        spec.num_parameters * element_bytes, len(placement.ranks)
    )
    num_gathered = spec.num_parameters if is_one_unit else _num_gathered(spec, "lm")
    sizes = adapter_sizes(spec, cfg, placement.axes["fsdp"], element_bytes, num_gathered)
    activations = _activation_bytes(spec, cfg, "lm", _num_layers_on_gpu(spec, cfg))
    return Ledger(
        (
            Entry("base", sizes.base),
            Entry("master", sizes.master),
            Entry("moments", sizes.moments),
            Entry("grads", sizes.grads, ("train",)),
            Entry("gathered", sizes.gathered, ("train",)),
            Entry("activations", activations, ("train",)),
        )
    )


def in_turn(roles: Iterable[PlannedRole], working_bytes: int) -> Iterator[Ledger]:
    """Yield the ledger of each role on a rank, where one computes after the other.

    What a role needs only while it computes, it needs instead of the role before. So the entry
    "working" has what this role needs beyond the largest so far, which is `working_bytes` at first.
    """
    for role in roles:
        ledger = role.ledger()
        own_bytes = ledger.only_in("train")
        yield Ledger(
            (
                *(
                    replace(entry, tag=f"{role.name} {entry.tag}")
                    for entry in ledger.entries
                    if entry.phases != ("train",)
                ),
                Entry(f"{role.name} working", max(own_bytes - working_bytes, 0), ("train",)),
            )
        )
        working_bytes = max(working_bytes, own_bytes)


def _frozen_memory(spec: ModelSpec, cfg: FrozenConfig, placement: Placement, head: Head) -> Ledger:
    """Return the ledger of a frozen model: its forward pass keeps one layer at a time."""
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    num_parameters = _num_parameters(spec, head)
    is_whole = cfg.gathers_whole(num_parameters * element_bytes, len(placement.ranks))
    activations = activation_bytes(
        num_tokens=cfg.max_tokens,
        num_layers=1,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=_logit_bytes(cfg, spec, head),
        slope_bytes=0,
        element_bytes=element_bytes,
        recompute="none",
    )
    return frozen_ledger(
        num_parameters,
        placement.axes["fsdp"],
        element_bytes,
        num_gathered=num_parameters if is_whole else _num_gathered(spec, head),
        activations=activations,
    )


def _activation_bytes(spec: ModelSpec, cfg: TrainerConfig, head: Head, num_layers: int) -> int:
    """Return what a micro-batch takes where `num_layers` keep their part for the backward pass."""
    return activation_bytes(
        num_tokens=cfg.max_tokens,
        num_layers=num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=_logit_bytes(cfg, spec, head),
        slope_bytes=_slope_bytes(cfg, spec) if head == "lm" else 0,
        element_bytes=ITEM_BYTES[dtype_on_gpu(cfg)],
        recompute=cfg.backend.recompute,
    )


def _num_layers_on_gpu(spec: ModelSpec, cfg: TrainerConfig) -> int:
    """Return the layers whose activations are on the GPU at once."""
    at_once = OFFLOADING_LAYERS if cfg.backend.offload_activations else spec.num_layers
    return min(at_once, spec.num_layers)


def _is_one_unit(spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head) -> bool:
    num_bytes = _num_parameters(spec, head) * FP32_BYTES
    return cfg.backend.gathers_whole(num_bytes, len(placement.ranks))


def _unit_sizes(spec: ModelSpec, head: Head) -> tuple[int, int]:
    """Return the parameters of a layer, and those that belong to none."""
    shapes = spec.parameter_shapes(head).items()
    layer = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers.0."))
    return layer, _num_parameters(spec, head) - spec.num_layers * layer


def _copies(unit: int, num_shards: int) -> int:
    """Return the bytes in which FSDP reduces a unit's gradients: all of them, and two shards."""
    return (unit + 2 * -(-unit // num_shards)) * FP32_BYTES


def _num_parameters(spec: ModelSpec, head: Head) -> int:
    return sum(prod(shape) for shape in spec.parameter_shapes(head).values())


def _logit_bytes(cfg: TrainerConfig | FrozenConfig, spec: ModelSpec, head: Head) -> int:
    """Return the bytes of the logits that exist at once; a value head has none."""
    return cfg.logit_rows * spec.vocab_size * ITEM_BYTES["float32"] if head == "lm" else 0


def _slope_bytes(cfg: TrainerConfig, spec: ModelSpec) -> int:
    """Return what the head keeps for the backward pass; on a CPU little enough to leave out."""
    if dtype_on_gpu(cfg) == "float32" or cfg.backend.recompute == "all":
        return 0
    return cfg.max_tokens * spec.vocab_size * ITEM_BYTES[dtype_on_gpu(cfg)]


def _num_gathered(spec: ModelSpec, head: Head) -> int:
    """Return the parameters that FSDP holds whole at once where each layer is a unit.

    They are the root's and those of two neighbouring layers.
    """
    layer, rest = _unit_sizes(spec, head)
    return min(spec.num_layers, 2) * layer + rest
