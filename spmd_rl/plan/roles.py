"""Roles of a planned run: which a recipe's config names, with their classes, settings and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spmd_rl.controller.capabilities import MemoryPlanner, Sleeper, capabilities
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.offload.gpu_overhead import Peers
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.phases import ALL, Tags
from spmd_rl.plan.needs import INFER, TRAIN, RunNeeds
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.train.config import TrainerConfig, is_sharded
from spmd_rl.train.cost.memory import dtype_on_gpu
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.training_role import TrainingRole


@dataclass(frozen=True)
class PlannedRole:
    """A role that a recipe spawns, as `spawn` gets it: name, class, settings, ranks and model.

    `lora` says which adapters an engine gets, and `row_shards` in how many parts models sum.
    """

    name: str
    role: type[Role]
    cfg: Any
    placement: Placement
    model: str = ""
    is_refreshed: bool = False
    lora: LoraConfig = NO_LORA
    row_shards: int = 1

    @property
    def trainer(self) -> TrainerConfig | None:
        """Its settings, if it learns."""
        return self.cfg if isinstance(self.cfg, TrainerConfig) else None

    @property
    def is_extra(self) -> bool:
        """Whether it is neither the trainer nor the engine."""
        return self.name not in (TRAIN, INFER)

    @property
    def is_counted(self) -> bool:
        """Whether its class says what memory it takes."""
        return MemoryPlanner in capabilities(self.role)

    @property
    def can_sleep(self) -> bool:
        return Sleeper in capabilities(self.role)

    @cached_property
    def tags(self) -> Tags:
        """The tags by which it sleeps; a role without any sleeps as a whole."""
        tags: Tags = getattr(self.role, "MEMORY_TAGS", ALL)
        return tags

    @property
    def computes_on_gpu(self) -> bool:
        """Whether it computes in a dtype that only GPUs do."""
        return hasattr(self.cfg, "dtype") and dtype_on_gpu(self.cfg) == "bfloat16"

    @property
    def holds_whole_tensors(self) -> bool:
        """Whether a trainer on one shard has each tensor as one piece, which an engine can share.

        Megatron-core fuses tensors.
        """
        return self.trainer is not None and self.trainer.backend.holds_whole_tensors

    @property
    def exchanges(self) -> tuple[Peers, ...]:
        """Whom a train step sends rows to: of gradients or weights to the ranks that shard, of
        tokens and sums to those that share sequences or matrices in FSDP2.
        """
        trainer, placement = self.trainer, self.placement
        if trainer is None:
            return ()
        along: list[tuple[str, ...]] = [(axis,) for axis in trainer.backend.sends_along]
        if trainer.deterministic or trainer.optimizer.kind == "muon":
            along.append(("fsdp", "cp"))
        groups = (placement.ranks_along(placement.ranks[0], axes) for axes in along)
        return tuple(Peers(ranks, len(ranks) - 1) for ranks in groups)

    @property
    def has_mesh(self) -> bool:
        """Whether its ranks gather weights or sum gradients around a ring."""
        return is_sharded(self.cfg)

    def memory(self, on_gpu: bool) -> Sequence[TagBytes]:
        """Return what it takes of one of its ranks; nothing where its class does not say."""
        asked, shards = (self.cfg, self.placement, self.model, on_gpu), self.row_shards
        if issubclass(self.role, Rollout):
            return self.role.planned_memory(*asked, self.lora, shards)
        if shards > 1 and issubclass(self.role, (TrainingRole, FrozenModel)):
            return self.role.planned_memory(*asked, shards)
        if not issubclass(self.role, MemoryPlanner):
            return ()
        return self.role.planned_memory(*asked)


def planned_roles(
    placements: Placements, needs: RunNeeds, row_shards: Mapping[str, int]
) -> tuple[PlannedRole, ...]:
    """Return the roles of a run: those that its split places, and its `extra_roles()`.

    `row_shards` says by placement in how many parts models sum, where they do.

    Raises: PlanError where the settings of a placed role are missing, or a role has no ranks.
    """
    main = []
    if TRAIN in placements:
        cfg = _required(needs.trainer, TRAIN, "trainer: TrainerConfig")
        main.append(PlannedRole(TRAIN, needs.trainer_role, cfg, placements.train, needs.model))
    if INFER in placements:
        engine = _required(needs.engine, INFER, "engine: NativeEngineConfig")
        lora = NO_LORA if needs.trainer is None else needs.trainer.lora.of_engine
        main.append(PlannedRole(INFER, Rollout, engine, placements.infer, needs.model, lora=lora))
    extra = [
        PlannedRole(
            role.name,
            role.role_class,
            role.cfg,
            role.placement(placements),
            role.model,
            role.is_refreshed,
        )
        for role in needs.extra_roles()
    ]
    every = *main, *extra
    return tuple(replace(one, row_shards=row_shards.get(one.placement.name, 1)) for one in every)


def uncounted(placements: Placements, roles: Sequence[PlannedRole]) -> tuple[str, ...]:
    """Return the names of placements and roles whose memory nobody states."""
    placed = {TRAIN, INFER, *(role.placement.name for role in roles)}
    unknown = [name for name in placements if name not in placed]
    return *unknown, *(role.name for role in roles if not role.is_counted)


def _required(cfg: object, name: str, field: str) -> object:
    """Return the settings of a placed role. Raises: PlanError if they are missing."""
    if cfg is None:
        raise PlanError(f"split.{name} cannot be planned: this recipe's config has no `{field}`")
    return cfg
