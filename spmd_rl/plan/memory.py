"""Memory of a planned run: the ledger of each rank, from the roles that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import (
    CONTEXT_BYTES,
    Entry,
    Ledger,
    Phase,
    activation_bytes,
    buckets_ledger,
    device_ledger,
    engine_ledger,
    kv_budget,
    kv_pages,
    kv_token_bytes,
    total,
)
from spmd_rl.plan.model_memory import (
    PlannedRole,
    dtype_on_gpu,
    exchanges,
    in_turn,
    trainer_memory,
)
from spmd_rl.plan.routes import Routes
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import Fsdp2Config
from spmd_rl.weights.layout import ITEM_BYTES

EngineConfig = NativeEngineConfig | SglangEngineConfig


def rank_ledgers(
    placements: Placements,
    spec: ModelSpec,
    cfg: Any,
    routes: Routes,
    world_size: int,
    on_gpu: bool,
    extra: Sequence[PlannedRole] = (),
) -> Iterator[tuple[int, Ledger]]:
    """Yield each rank with its ledger: its roles, the buckets of a push, and the GPU's own memory.

    `extra` are the roles besides trainer and engine. An engine's pages have no size yet.
    """
    num_communicators = _num_communicators(placements, routes, extra)

    @cache
    def of_roles(names: tuple[str, ...]) -> tuple[Ledger, int, int]:
        """Return the ledger of the roles on these placements, and their rings and peers."""
        on_ranks = [role for role in extra if role.placement.name in names]
        ledger = total(_role_ledgers(names, placements, spec, cfg, on_gpu))
        ledger += total(in_turn(on_ranks, ledger.only_in("train")))
        return ledger, *_connections(names, placements, cfg, on_ranks)

    ranks = {name: set(placement.ranks) for name, placement in placements.items()}
    for rank in range(world_size):
        names = tuple(name for name in ranks if rank in ranks[name])
        ledger, num_rings, num_peers = of_roles(names)
        ledger += buckets_ledger(routes.bucket_bytes(rank))
        if on_gpu:
            num_peers += routes.num_peers(rank)
            ledger += device_ledger(num_communicators, num_rings, num_peers)
        yield rank, ledger


def _connections(
    names: tuple[str, ...], placements: Placements, cfg: Any, extra: Sequence[PlannedRole]
) -> tuple[int, int]:
    """Return the rings that gradients and weights go around, and the peers that rows are sent to.

    Roles on the same ranks and axes share their connections.
    """
    configs = [(role.placement, role.cfg) for role in extra]
    if "train" in names:
        configs.append((placements.train, cfg.trainer))
    placed = {_key(placement): placement.axes for placement, _ in configs}
    exchanging = {_key(placement) for placement, of_role in configs if exchanges(of_role)}
    num_rings = sum(size > 1 for axes in placed.values() for size in axes.values())
    return num_rings, sum(placed[key]["fsdp"] - 1 for key in exchanging)


def _key(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Return what roles that share process groups have in common."""
    return placement.ranks, tuple(placement.axes.values())


def kv_bytes(
    spec: ModelSpec, cfg: EngineConfig, capacity_bytes: int | None, reserved_bytes: int
) -> int:
    """Return the bytes of one engine's keys and values: as many as are set, else as fit."""
    item_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    token_bytes = kv_token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, item_bytes)
    page_size, set_pages = 1, 0
    if isinstance(cfg, NativeEngineConfig):
        page_size, set_pages = cfg.page_size or GPU_PAGE_SIZE, cfg.num_pages
    budget = None
    if capacity_bytes is not None:
        budget = kv_budget(capacity_bytes, cfg.memory_fraction, reserved_bytes)
    pages = set_pages or kv_pages(
        token_bytes, page_size, context=spec.max_positions, batch=cfg.max_batch, budget_bytes=budget
    )
    return pages * page_size * token_bytes


def _role_ledgers(
    roles: tuple[str, ...], placements: Placements, spec: ModelSpec, cfg: Any, on_gpu: bool
) -> Iterator[Ledger]:
    """Yield what a trainer and an engine take of a rank that serves `roles`."""
    if "train" in roles:
        yield trainer_memory(spec, cfg.trainer, placements.train)
    if "infer" in roles:
        sleeps = "train" in roles and getattr(cfg, "engine_sleeps", False)
        step = _step_bytes(cfg.engine, spec) if on_gpu else 0
        if isinstance(cfg.engine, SglangEngineConfig):
            yield _sglang_ledger(cfg.engine, spec, sleeps, step, on_gpu)
            return
        dtype = dtype_on_gpu(cfg.engine)
        is_unsharded = (
            "train" in roles
            and placements.train.axes["fsdp"] == 1
            and isinstance(cfg.trainer.backend, Fsdp2Config)
        )
        shares_weights = is_unsharded and dtype == "float32"
        yield engine_ledger(
            spec.num_parameters,
            0 if shares_weights else ITEM_BYTES[dtype],
            kv_bytes=0,  # known when all else is
            sleeps=sleeps,
            step=step,
        )


def _sglang_ledger(
    cfg: SglangEngineConfig, spec: ModelSpec, sleeps: bool, step: int, on_gpu: bool
) -> Ledger:
    """Return the ledger of an SGLang engine: its child never shares the trainer's weights.

    The slab of a push and the child's own context stay while it sleeps.
    """
    weights = spec.num_parameters * ITEM_BYTES[dtype_on_gpu(cfg)]
    awake: tuple[Phase, ...] = ("sync", "rollout")
    own = engine_ledger(spec.num_parameters, 0, kv_bytes=0, sleeps=sleeps, step=step)
    return own + Ledger(
        (
            Entry("weights", weights, awake)
            if sleeps and cfg.sleep_weights
            else Entry("weights", weights),
            Entry("slab", min(cfg.slab_bytes, 2 * weights)),
            Entry("child", CONTEXT_BYTES if on_gpu else 0),
        )
    )


def _num_communicators(placements: Placements, routes: Routes, extra: Sequence[PlannedRole]) -> int:
    """Return how many communicators NCCL makes: the world's, and three for each placement.

    The three are those of its axes dp and fsdp, and of all its ranks. A link is placed too.
    """
    distinct = {_key(placement) for placement in placements.values()}
    linked = [role.placement for role in extra if role.is_refreshed and "train" in placements]
    if routes:
        linked.append(placements.infer)
    for placement in linked:
        ranks = tuple(sorted({*placements.train.ranks, *placement.ranks}))
        distinct.add((ranks, (len(ranks), 1, 1)))
    return 1 + 3 * len(distinct)


def _step_bytes(cfg: EngineConfig, spec: ModelSpec) -> int:
    """Return the workspace of a step: one layer of its tokens, and twice a full batch's logits."""
    set_tokens = cfg.max_step_tokens if isinstance(cfg, NativeEngineConfig) else 0
    return activation_bytes(
        num_tokens=set_tokens or max(cfg.max_batch, GPU_STEP_TOKENS),
        num_layers=1,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=cfg.max_batch * spec.vocab_size * ITEM_BYTES["float32"],
        slope_bytes=0,
        element_bytes=ITEM_BYTES[dtype_on_gpu(cfg)],
        recompute="none",
    )
