"""Memory of models that train or are frozen: the ledger of one rank, from config and placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.ledger import Entry, Ledger, activation_bytes, frozen_ledger, trainer_ledger
from spmd_rl.plan.megatron_memory import megatron_ledger
from spmd_rl.train.config import FrozenConfig, TrainerConfig, fsdp2_settings
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.parameter_groups import moment_bytes, update_rules
from spmd_rl.weights.layout import ITEM_BYTES


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
    if isinstance(cfg.backend, MegatronConfig) and head == "lm":
        return megatron_ledger(spec, cfg, cfg.backend, placement, dtype_on_gpu(cfg))
    backend = fsdp2_settings(cfg)
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    num_shards = placement.axes["fsdp"]
    shapes = spec.parameter_shapes(head)
    num_parameters = _num_parameters(spec, head)
    rules = update_rules(shapes, cfg, num_shards)
    activations = activation_bytes(
        num_tokens=cfg.max_tokens,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=_logit_bytes(cfg, spec, head),
        slope_bytes=_slope_bytes(cfg, spec) if head == "lm" else 0,
        element_bytes=element_bytes,
        recompute=backend.recompute,
    )
    is_one_unit = backend.gathers_whole(
        num_parameters * ITEM_BYTES["float32"], len(placement.ranks)
    )
    # Without shards the gathered weights are kept until the end of the step.
    is_whole = num_shards == 1 or is_one_unit
    return trainer_ledger(
        num_parameters,
        num_shards,
        element_bytes,
        num_trained=sum(prod(shapes[name]) for name in rules),
        moments=moment_bytes(shapes, rules, num_shards),
        num_gathered=num_parameters if is_whole else _num_gathered(spec, head),
        activations=activations,
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


def _num_parameters(spec: ModelSpec, head: Head) -> int:
    return sum(prod(shape) for shape in spec.parameter_shapes(head).values())


def _logit_bytes(cfg: TrainerConfig | FrozenConfig, spec: ModelSpec, head: Head) -> int:
    """Return the bytes of the logits that exist at once; a value head has none."""
    return cfg.logit_rows * spec.vocab_size * ITEM_BYTES["float32"] if head == "lm" else 0


def _slope_bytes(cfg: TrainerConfig, spec: ModelSpec) -> int:
    """Return what the head keeps for the backward pass; on a CPU little enough to leave out."""
    if dtype_on_gpu(cfg) == "float32" or fsdp2_settings(cfg).recompute == "all":
        return 0
    return cfg.max_tokens * spec.vocab_size * ITEM_BYTES[dtype_on_gpu(cfg)]


def _num_gathered(spec: ModelSpec, head: Head) -> int:
    """Return the parameters that FSDP holds whole at once where each layer is a unit.

    They are the root's and those of two neighbouring layers.
    """
    shapes = spec.parameter_shapes(head).items()
    layer = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers.0."))
    return _num_parameters(spec, head) - max(spec.num_layers - 2, 0) * layer
