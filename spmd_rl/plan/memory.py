"""Memory of a planned run: the ledger of each rank, from the roles that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
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
    trainer_ledger,
)
from spmd_rl.plan.routes import Routes
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.parameter_groups import moment_bytes, update_rules
from spmd_rl.weights.layout import ITEM_BYTES

EngineConfig = NativeEngineConfig | SglangEngineConfig


def rank_ledgers(
    placements: Placements, spec: ModelSpec, cfg: Any, routes: Routes, world_size: int, on_gpu: bool
) -> Iterator[tuple[int, Ledger]]:
    """Yield each rank with its ledger: its roles, the buckets of a push, and the GPU's own memory.

    An engine's pages have no size yet.
    """
    num_communicators = _num_communicators(placements, routes)
    ledger_of_roles = cache(
        lambda roles: total(_role_ledgers(roles, placements, spec, cfg, on_gpu))
    )
    ranks = {name: set(placement.ranks) for name, placement in placements.items()}
    for rank in range(world_size):
        roles = tuple(name for name in ranks if rank in ranks[name])
        ledger = ledger_of_roles(roles) + buckets_ledger(routes.bucket_bytes(rank))
        if on_gpu:
            axes = placements.train.axes if "train" in roles else {}
            summed_by_peers = axes["fsdp"] - 1 if axes and _exchanges(cfg.trainer) else 0
            num_rings = sum(size > 1 for size in axes.values())
            num_peers = routes.num_peers(rank) + summed_by_peers
            ledger += device_ledger(num_communicators, num_rings, num_peers)
        yield rank, ledger


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


def dtype_on_gpu(cfg: TrainerConfig | EngineConfig) -> str:
    """Return the dtype that a role computes in on a GPU."""
    return "bfloat16" if cfg.dtype == "auto" else cfg.dtype


def _role_ledgers(
    roles: tuple[str, ...], placements: Placements, spec: ModelSpec, cfg: Any, on_gpu: bool
) -> Iterator[Ledger]:
    """Yield what a trainer and an engine take of a rank that serves `roles`."""
    if "train" in roles:
        yield _trainer_ledger(spec, cfg.trainer, placements.train)
    if "infer" in roles:
        sleeps = "train" in roles and getattr(cfg, "engine_sleeps", False)
        step = _step_bytes(cfg.engine, spec) if on_gpu else 0
        if isinstance(cfg.engine, SglangEngineConfig):
            yield _sglang_ledger(cfg.engine, spec, sleeps, step, on_gpu)
            return
        dtype = dtype_on_gpu(cfg.engine)
        is_unsharded = "train" in roles and placements.train.axes["fsdp"] == 1
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


def _trainer_ledger(spec: ModelSpec, cfg: TrainerConfig, placement: Placement) -> Ledger:
    element_bytes = ITEM_BYTES[dtype_on_gpu(cfg)]
    activations = activation_bytes(
        num_tokens=cfg.max_tokens,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=cfg.logit_rows * spec.vocab_size * ITEM_BYTES["float32"],
        slope_bytes=_slope_bytes(cfg, spec),
        element_bytes=element_bytes,
        recompute=cfg.backend.recompute,
    )
    num_shards = placement.axes["fsdp"]
    shapes = spec.parameter_shapes()
    rules = update_rules(shapes, cfg, num_shards)
    return trainer_ledger(
        spec.num_parameters,
        num_shards,
        element_bytes,
        num_trained=sum(prod(shapes[name]) for name in rules),
        moments=moment_bytes(shapes, rules, num_shards),
        num_gathered=_num_gathered(spec, cfg, placement),
        activations=activations,
    )


def _exchanges(cfg: TrainerConfig) -> bool:
    """Return whether a train step sends rows of gradients or weights to each rank that shards."""
    return cfg.deterministic or cfg.optimizer.kind == "muon"


def _num_communicators(placements: Placements, routes: Routes) -> int:
    """Return how many communicators NCCL makes: the world's, and three for each placement.

    The three are those of its axes dp and fsdp, and of all its ranks. A link is placed too.
    """
    distinct = {(placement.ranks, *placement.axes.values()) for placement in placements.values()}
    if routes:
        ranks = {rank for placement in placements.values() for rank in placement.ranks}
        distinct.add((tuple(sorted(ranks)), len(ranks), 1, 1))
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


def _slope_bytes(cfg: TrainerConfig, spec: ModelSpec) -> int:
    """Return what the head keeps for the backward pass; on a CPU little enough to leave out."""
    if dtype_on_gpu(cfg) == "float32" or cfg.backend.recompute == "all":
        return 0
    return cfg.max_tokens * spec.vocab_size * ITEM_BYTES[dtype_on_gpu(cfg)]


def _num_gathered(spec: ModelSpec, cfg: TrainerConfig, placement: Placement) -> int:
    """Return the parameters that FSDP holds whole at once.

    These are all parameters where the model is one unit, or where nothing is sharded, because they
    are then kept until the end of the step. Else they are the root's and two neighbouring layers'.
    """
    num_bytes = spec.num_parameters * ITEM_BYTES["float32"]
    is_one_unit = cfg.backend.gathers_whole(num_bytes, len(placement.ranks))
    if placement.axes["fsdp"] == 1 or is_one_unit:
        return spec.num_parameters
    shapes = spec.parameter_shapes().items()
    layer = sum(prod(shape) for name, shape in shapes if name.startswith("model.layers.0."))
    return spec.num_parameters - max(spec.num_layers - 2, 0) * layer
