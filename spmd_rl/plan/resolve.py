"""Plan of a run: from a recipe's config and a world size to plain data.

The plan reads four fields of the config: `split` places roles, `model` gives shapes, `trainer` and
`engine` say how the roles hold them. `engine_sleeps` says whether one makes room for the other. A
method `extra_roles()` lists the roles besides (train/extra_role.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.axes import MODEL, groups_along
from spmd_rl.mesh.split import Placement, Placements, disjoint, plan_split
from spmd_rl.model.spec import ModelSpec, head_of
from spmd_rl.offload.ledger import Ledger
from spmd_rl.plan.memory import kv_bytes, rank_ledgers
from spmd_rl.plan.model_memory import PlannedRole, dtype_on_gpu
from spmd_rl.plan.routes import Routes, push_routes
from spmd_rl.rollout.engine import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.extra_role import ExtraRole
from spmd_rl.train.megatron.check import check_axes, spec_to_train

# the field of a recipe's config that each placement is planned by, and its types
ROLE_CONFIGS: dict[str, tuple[str, tuple[type, ...]]] = {
    "train": ("trainer", (TrainerConfig,)),
    "infer": ("engine", (NativeEngineConfig, SglangEngineConfig)),
}


@dataclass(frozen=True)
class RunPlan:
    """All that is known of a run before it starts. `ledgers` go by rank."""

    world_size: int
    placements: Placements
    spec: ModelSpec | None
    routes: Routes
    ledgers: dict[int, Ledger]
    on_gpu: bool = False  # whether the ledgers count what a GPU itself takes
    extra: tuple[PlannedRole, ...] = ()  # roles besides trainer and engine

    @property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Process groups by name: each role's mesh axes with several ranks, and the link."""
        groups = [
            (f"{placement.name}.{axis}", ranks)
            for placement in self.placements.values()
            for axis, ranks in _axis_groups(placement)
        ]
        if self.routes:
            linked = {*self.placements.train.ranks, *self.placements.infer.ranks}
            groups.append(("link", tuple(sorted(linked))))
        return groups

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that serve no role."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._ranks_with_roles)

    @property
    def _ranks_with_roles(self) -> set[int]:
        return {rank for placement in self.placements.values() for rank in placement.ranks}

    def reserved_bytes(self) -> int:
        """Return what is planned beside an engine's pages at most, on any of its ranks."""
        return max(self.ledgers[rank].beside_bytes("kv") for rank in self.placements.infer.ranks)

    def peak_ranks(self) -> dict[tuple[str, ...], int]:
        """Return the rank that needs most memory for each set of roles that share ranks."""
        return {
            roles: max(ranks, key=lambda rank: self.ledgers[rank].peak_bytes())
            for roles, ranks in self._ranks_by_roles().items()
        }

    def _ranks_by_roles(self) -> dict[tuple[str, ...], list[int]]:
        """Return the ranks that serve each set of roles."""
        roles_of: dict[int, tuple[str, ...]] = {}
        for placement in self.placements.values():
            for rank in placement.ranks:
                roles_of[rank] = (*roles_of.get(rank, ()), placement.name)
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted(roles_of):
            ranks_of.setdefault(roles_of[rank], []).append(rank)
        return ranks_of

    def require(self, capacity_bytes: int) -> None:
        """Raise a PlanError with the sum of the first rank and phase that do not fit, if any."""
        for rank, ledger in sorted(self.ledgers.items()):
            try:
                ledger.require(capacity_bytes)
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None


def resolve(cfg: Any, world_size: int, capacity_bytes: int | None = None) -> RunPlan:
    """Return the plan of a run on devices of `capacity_bytes`, None where that is not known.

    Raises: PlanError when the split does not fit; ConfigError when the model folder does not serve.
    """
    placements = _placements(cfg, world_size)
    model = getattr(cfg, "model", "")
    if not model or not isinstance(model, str):
        return RunPlan(world_size, placements, None, Routes.none(world_size), {})
    spec = spec_to_train(model, getattr(cfg, "trainer", None))
    plan = _without_pages(placements, spec, cfg, world_size)
    if "infer" not in placements:
        return plan
    page_bytes = kv_bytes(spec, cfg.engine, capacity_bytes, plan.reserved_bytes())
    sized = {rank: ledger.sized("kv", page_bytes) for rank, ledger in plan.ledgers.items()}
    return replace(plan, ledgers=sized)


def _placements(cfg: Any, world_size: int) -> Placements:
    """Return where the config's split places its roles. Raises: PlanError when it has no split."""
    split = getattr(cfg, "split", None)
    if split is None:
        raise PlanError("this recipe's config has no `split`, so there is nothing to plan")
    placements = plan_split(split, world_size)
    check_axes(cfg, placements)
    return placements


def _without_pages(placements: Placements, spec: ModelSpec, cfg: Any, world_size: int) -> RunPlan:
    """Return the plan in which an engine's pages have no size yet."""
    _require_configs(placements, cfg)
    extra = _extra_roles(placements, cfg)
    routes = _push_routes(placements, spec, cfg, world_size)
    on_gpu = _on_gpu(placements, cfg, extra)
    ledgers = rank_ledgers(placements, spec, cfg, routes, world_size, on_gpu, extra)
    return RunPlan(world_size, placements, spec, routes, dict(ledgers), on_gpu, extra)


def _extra_roles(placements: Placements, cfg: Any) -> tuple[PlannedRole, ...]:
    """Return the roles besides trainer and engine. Raises: PlanError where one has no ranks."""
    listed: list[ExtraRole] = cfg.extra_roles() if hasattr(cfg, "extra_roles") else []
    return tuple(
        PlannedRole(
            role.name,
            role.cfg,
            role.placement(placements),
            ModelSpec.from_folder(role.model),
            head_of(role.model) if isinstance(role.cfg, FrozenConfig) else "value",
            role.is_refreshed,
        )
        for role in listed
    )


def planned_settings(cfg: Any, world_size: int) -> dict[str, dict[str, int]]:
    """Return the settings that the plan adds to a spawn, by the name of the placement.

    An engine gets the bytes that the ledger counts beside its pages. It gets none where their
    number is set, or where a role that the ledger does not know shares its ranks. A plan that
    fails adds nothing here: the run itself reports the error.
    """
    engine = getattr(cfg, "engine", None)
    if not isinstance(engine, ROLE_CONFIGS["infer"][1]):
        return {}
    if isinstance(engine, NativeEngineConfig) and engine.num_pages:
        return {}
    try:
        plan = resolve(cfg, world_size)
    except (ConfigError, PlanError):
        return {}
    infer = plan.placements.get("infer")
    if infer is None or not plan.ledgers:
        return {}
    known = {*ROLE_CONFIGS, *(role.placement.name for role in plan.extra)}
    for name, placement in plan.placements.items():
        if name not in known and not disjoint(infer, placement):
            return {}
    return {"infer": {"reserved_bytes": plan.reserved_bytes()}}


def _require_configs(placements: Placements, cfg: Any) -> None:
    """Raise a PlanError if the config of a placed role is missing."""
    for name, (field, classes) in ROLE_CONFIGS.items():
        if name in placements and not isinstance(getattr(cfg, field, None), classes):
            raise PlanError(
                f"split.{name} cannot be planned: this recipe's config has no "
                f"`{field}: {classes[0].__name__}`"
            )


def _on_gpu(placements: Placements, cfg: Any, extra: tuple[PlannedRole, ...]) -> bool:
    """Return whether the run is planned for GPUs, where a role computes in bfloat16."""
    configs = [getattr(cfg, ROLE_CONFIGS[name][0]) for name in placements if name in ROLE_CONFIGS]
    configs += [role.cfg for role in extra]
    return any(dtype_on_gpu(config) == "bfloat16" for config in configs)


def _push_routes(placements: Placements, spec: ModelSpec, cfg: Any, world_size: int) -> Routes:
    train, infer = placements.get("train"), placements.get("infer")
    if train is None or infer is None:
        return Routes.none(world_size)
    shapes = Counter(spec.parameter_shapes().values())
    return push_routes(train, infer, shapes, dtype_on_gpu(cfg.engine), world_size)


def _axis_groups(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of ranks that differ in one axis alone, for axes of more than one rank."""
    return [
        (axis, ranks)
        for axis in ("fsdp", "dp", *MODEL)
        if placement.axes.get(axis, 1) > 1
        for ranks in groups_along(placement.ranks, placement.axes, (axis,))
    ]
