"""From a recipe's config and a world size to the resolved plan, as plain data.

A recipe is planned by the parts of its config that this room knows: `split` places roles, `model`
gives shapes, `trainer` and `engine` say how they are held, `engine_sleeps` whether one makes room
for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import Placement, Placements, disjoint, plan_split
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import (
    Ledger,
    activation_bytes,
    buckets_ledger,
    device_ledger,
    engine_ledger,
    kv_budget,
    kv_pages,
    kv_token_bytes,
    total,
    trainer_ledger,
)
from spmd_rl.plan.routes import Routes, push_routes
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, NativeEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.weights.layout import ITEM_BYTES

# what a role is planned by
PARTS = {"train": ("trainer", TrainerConfig), "infer": ("engine", NativeEngineConfig)}


@dataclass(frozen=True)
class Resolved:
    """All that can be known of a run before it starts."""

    world_size: int
    placements: Placements
    spec: ModelSpec | None
    routes: Routes
    ledgers: dict[int, Ledger]
    on_gpu: bool = False  # whether the ledgers count what a GPU itself takes

    @property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Process groups by name: each role's mesh dims that hold several ranks, and the link."""
        found = [
            (f"{placement.name}.{axis}", ranks)
            for placement in self.placements.values()
            for axis, ranks in _axis_groups(placement)
        ]
        if self.routes:
            union = {rank for placement in self.placements.values() for rank in placement.ranks}
            found.append(("link", tuple(sorted(union))))
        return found

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that serve no role."""
        busy = {rank for placement in self.placements.values() for rank in placement.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in busy)

    def reserved_bytes(self) -> int:
        """What all that is counted beside an engine's pages takes at most, on any of its ranks
        while they are there.
        """
        return max(self.ledgers[rank].beside_bytes("kv") for rank in self.placements.infer.ranks)

    def peak_ranks(self) -> dict[tuple[str, ...], int]:
        """For each set of roles that share ranks, the one of these that needs most memory, the
        lowest of equals.
        """
        roles_of: dict[int, tuple[str, ...]] = {}
        for placement in self.placements.values():
            for rank in placement.ranks:
                roles_of[rank] = (*roles_of.get(rank, ()), placement.name)
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted(roles_of):
            ranks_of.setdefault(roles_of[rank], []).append(rank)
        return {
            roles: max(ranks, key=lambda rank: self.ledgers[rank].peak_bytes())
            for roles, ranks in ranks_of.items()
        }

    def require(self, capacity_bytes: int) -> None:
        """Raises: PlanError with the arithmetic of the first rank and phase that cannot fit."""
        for rank, ledger in sorted(self.ledgers.items()):
            try:
                ledger.require(capacity_bytes)
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None


def resolve(cfg: Any, world_size: int, capacity_bytes: int | None = None) -> Resolved:
    """The plan for devices of this memory, of which an engine takes its part; None where that is
    not known.

    Raises: PlanError when the split does not fit; ConfigError when the model folder does not
    serve."""
    split = getattr(cfg, "split", None)
    if split is None:
        raise PlanError("this recipe's config has no `split`, so there is nothing to plan")
    placements = plan_split(split, world_size)
    model = getattr(cfg, "model", "")
    spec = ModelSpec.from_folder(model) if model and isinstance(model, str) else None
    for name, (part, kind) in PARTS.items():
        if (
            spec is not None
            and name in placements
            and not isinstance(getattr(cfg, part, None), kind)
        ):
            raise PlanError(
                f"split.{name} cannot be planned: this recipe's config has no `{part}: {kind.__name__}`"
            )
    routes = _routes(placements, spec, cfg, world_size)
    on_gpu = spec is not None and _on_gpu(placements, cfg)
    ledgers = (
        {} if spec is None else dict(_ledgers(placements, spec, cfg, routes, world_size, on_gpu))
    )
    resolved = Resolved(world_size, placements, spec, routes, ledgers, on_gpu)
    if spec is None or "infer" not in placements:
        return resolved
    kv_bytes = _kv_bytes(spec, cfg.engine, capacity_bytes, resolved.reserved_bytes())
    return replace(
        resolved, ledgers={rank: ledger.sized("kv", kv_bytes) for rank, ledger in ledgers.items()}
    )


def planned_settings(cfg: Any, world_size: int) -> dict[str, dict[str, int]]:
    """Return the settings that the plan adds to a spawn, by the name of the placement.

    An engine gets the bytes that the ledger counts beside its pages. It gets none where their
    number is set, or where a role that the ledger does not know shares its ranks. A plan that
    fails adds nothing here: the run itself reports the error.
    """
    engine = getattr(cfg, "engine", None)
    if not isinstance(engine, NativeEngineConfig) or engine.num_pages:
        return {}
    try:
        resolved = resolve(cfg, world_size)
    except (ConfigError, PlanError):
        return {}
    infer = resolved.placements.get("infer")
    others = [placement for name, placement in resolved.placements.items() if name not in PARTS]
    if (
        infer is None
        or not resolved.ledgers
        or not all(disjoint(infer, placement) for placement in others)
    ):
        return {}
    return {"infer": {"reserved_bytes": resolved.reserved_bytes()}}


def _ledgers(
    placements: Placements, spec: ModelSpec, cfg: Any, routes: Routes, world_size: int, on_gpu: bool
) -> Iterator[tuple[int, Ledger]]:
    """Each rank's: what the roles on it take, what a push packs, and what the GPU itself does.

    An engine's pages have no size yet.
    """
    num_communicators = _num_communicators(placements, routes)
    of_roles = cache(lambda roles: total(_role_ledgers(roles, placements, spec, cfg, on_gpu)))
    ranks = {name: set(placement.ranks) for name, placement in placements.items()}
    for rank in range(world_size):
        roles = tuple(name for name in ranks if rank in ranks[name])
        ledger = of_roles(roles) + buckets_ledger(routes.bucket_bytes(rank))
        if on_gpu:
            axes = placements.train.axes if "train" in roles else {}
            summed_by_peers = axes["fsdp"] - 1 if axes and cfg.trainer.deterministic else 0
            num_rings = sum(size > 1 for size in axes.values())
            ledger += device_ledger(
                num_communicators, num_rings, routes.num_peers(rank) + summed_by_peers
            )
        yield rank, ledger


def _role_ledgers(
    roles: tuple[str, ...], placements: Placements, spec: ModelSpec, cfg: Any, on_gpu: bool
) -> Iterator[Ledger]:
    """What a trainer and an engine take of a rank that serves `roles`."""
    if "train" in roles:
        compute_bytes = ITEM_BYTES[_dtype(cfg.trainer)]
        yield trainer_ledger(
            spec.num_parameters,
            placements.train.axes["fsdp"],
            compute_bytes,
            num_gathered=_num_gathered(spec, cfg.trainer, placements.train),
            activations=activation_bytes(
                num_tokens=cfg.trainer.max_tokens,
                num_layers=spec.num_layers,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
                logit_bytes=cfg.trainer.logit_rows * spec.vocab_size * ITEM_BYTES["float32"],
                slope_bytes=_slope_bytes(cfg.trainer, spec),
                element_bytes=compute_bytes,
                recompute=cfg.trainer.backend.recompute,
            ),
        )
    if "infer" in roles:
        element_bytes = ITEM_BYTES[_dtype(cfg.engine)]
        aliased = (
            "train" in roles
            and placements.train.axes["fsdp"] == 1
            and _dtype(cfg.engine) == "float32"
        )
        yield engine_ledger(
            spec.num_parameters,
            0 if aliased else element_bytes,  # the engine can be the trainer's own memory
            kv_bytes=0,  # sized when all else is known
            sleeps="train" in roles and getattr(cfg, "engine_sleeps", False),
            step=_step_bytes(cfg.engine, spec) if on_gpu else 0,
        )


def _on_gpu(placements: Placements, cfg: Any) -> bool:
    """Whether the run is planned for GPUs: any role that computes in bfloat16 does so there."""
    return any(
        _dtype(getattr(cfg, PARTS[name][0])) == "bfloat16" for name in placements if name in PARTS
    )


def _dtype(cfg: TrainerConfig | NativeEngineConfig) -> str:
    """What GPUs compute in."""
    return "bfloat16" if cfg.dtype == "auto" else cfg.dtype


def _num_communicators(placements: Placements, routes: Routes) -> int:
    """The world's, and three of each placement: of its axes dp and fsdp, and of all its ranks. A
    link is placed too.
    """
    seats = {(placement.ranks, *placement.axes.values()) for placement in placements.values()}
    if routes:
        union = tuple(
            sorted({rank for placement in placements.values() for rank in placement.ranks})
        )
        seats.add((union, len(union), 1, 1))
    return 1 + 3 * len(seats)


def _step_bytes(cfg: NativeEngineConfig, spec: ModelSpec) -> int:
    """One layer of as many tokens as a step takes, and twice the logits of a full batch."""
    return activation_bytes(
        num_tokens=cfg.max_step_tokens or max(cfg.max_batch, GPU_STEP_TOKENS),
        num_layers=1,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=cfg.max_batch * spec.vocab_size * ITEM_BYTES["float32"],
        slope_bytes=0,
        element_bytes=ITEM_BYTES[_dtype(cfg)],
        recompute="none",
    )


def _slope_bytes(cfg: TrainerConfig, spec: ModelSpec) -> int:
    """What the head keeps for the backward pass: on a CPU, which computes in float32, little enough
    to leave out.
    """
    if _dtype(cfg) == "float32" or cfg.backend.recompute == "all":
        return 0
    return cfg.max_tokens * spec.vocab_size * ITEM_BYTES[_dtype(cfg)]


def _num_gathered(spec: ModelSpec, cfg: TrainerConfig, placement: Placement) -> int:
    """Parameters that FSDP holds whole at once: all where it takes the model as one, or where it
    cuts nothing, for they are kept till the step's end; else the root's, and a layer with the
    next."""
    num_bytes = spec.num_parameters * ITEM_BYTES["float32"]
    if placement.axes["fsdp"] == 1 or cfg.backend.gathers_whole(num_bytes, len(placement.ranks)):
        return spec.num_parameters
    layer = sum(
        prod(shape)
        for name, shape in spec.parameter_shapes().items()
        if name.startswith("model.layers.0.")
    )
    return spec.num_parameters - max(spec.num_layers - 2, 0) * layer


def _kv_bytes(
    spec: ModelSpec, cfg: NativeEngineConfig, capacity_bytes: int | None, reserved_bytes: int
) -> int:
    """What one engine's pages take: those given, else as many as it finds room for beside all else."""
    token_bytes = kv_token_bytes(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, ITEM_BYTES[_dtype(cfg)]
    )
    page_size = cfg.page_size or GPU_PAGE_SIZE
    budget = (
        None
        if capacity_bytes is None
        else kv_budget(capacity_bytes, cfg.memory_fraction, reserved_bytes)
    )
    pages = cfg.num_pages or kv_pages(
        token_bytes, page_size, context=spec.max_positions, batch=cfg.max_batch, budget_bytes=budget
    )
    return pages * page_size * token_bytes


def _routes(placements: Placements, spec: ModelSpec | None, cfg: Any, world_size: int) -> Routes:
    train, infer = placements.get("train"), placements.get("infer")
    if spec is None or train is None or infer is None:
        return Routes.none(world_size)
    return push_routes(
        train, infer, Counter(spec.parameter_shapes().values()), _dtype(cfg.engine), world_size
    )


def _axis_groups(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of ranks that differ in one axis alone, for axes of more than one rank."""
    dp, fsdp = placement.axes["dp"], placement.axes["fsdp"]
    groups = []
    if fsdp > 1:
        groups += [("fsdp", placement.ranks[i * fsdp : (i + 1) * fsdp]) for i in range(dp)]
    if dp > 1:
        groups += [("dp", placement.ranks[i::fsdp]) for i in range(fsdp)]
    return groups
