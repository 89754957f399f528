"""From a recipe's config and a world size to the resolved plan, as plain data.

A recipe is planned by the parts of its config that this room knows: `split` places roles, `model` gives shapes,
`trainer` and `engine` say how they are held, `sampling` and `prompts_per_step` how many tokens live at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements, plan_split
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import (
    Ledger,
    activation_bytes,
    buckets_ledger,
    device_ledger,
    engine_ledger,
    kv_token_bytes,
    total,
    trainer_ledger,
)
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, EngineConfig
from spmd_rl.train.config import WHOLE_MODEL_BYTES, TrainerConfig
from spmd_rl.weights.layout import ITEM_BYTES, Box, Layout, Piece, chunk_box
from spmd_rl.weights.plan import BUCKET_BYTES, plan


@dataclass(frozen=True)
class Resolved:
    """All that can be known of a run before it starts."""

    world_size: int
    placements: Placements
    spec: ModelSpec | None
    route_bytes: Counter[tuple[int, int]]
    ledgers: dict[int, Ledger]

    @property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Process groups by name: each role's mesh dims that hold several ranks, and the link."""
        found = [
            (f"{place.name}.{axis}", ranks) for place in self.placements.values() for axis, ranks in _axis_groups(place)
        ]
        if self.route_bytes:
            union = {rank for place in self.placements.values() for rank in place.ranks}
            found.append(("link", tuple(sorted(union))))
        return found

    def peak_rank(self) -> int:
        """The rank that needs most memory, the lowest of equals."""
        return max(sorted(self.ledgers), key=lambda rank: self.ledgers[rank].peak_bytes())

    def require(self, capacity_bytes: int) -> None:
        """Raises: PlanError with the arithmetic of the first rank and phase that cannot fit."""
        for rank, ledger in sorted(self.ledgers.items()):
            try:
                ledger.require(capacity_bytes)
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None


def resolve(cfg: Any, world_size: int) -> Resolved:
    """Raises: PlanError when the split does not fit; ConfigError when the model folder does not serve."""
    split = getattr(cfg, "split", None)
    if split is None:
        raise PlanError("this recipe's config has no `split`, so there is nothing to plan")
    placements = plan_split(split, world_size)
    model = getattr(cfg, "model", "")
    spec = ModelSpec.from_folder(model) if model else None
    moved = _route_bytes(placements, spec, cfg)
    ledgers = {rank: Ledger(()) for rank in range(world_size)}
    if spec is not None:
        ledgers = {rank: total(_rank_ledgers(rank, placements, spec, cfg, moved)) for rank in range(world_size)}
    return Resolved(world_size, placements, spec, moved, ledgers)


def _rank_ledgers(
    rank: int, placements: Placements, spec: ModelSpec, cfg: Any, moved: Counter[tuple[int, int]]
) -> Iterable[Ledger]:
    """One ledger for each role that this rank serves, one for pushes, and one for the GPU itself.

    What computes in bfloat16 does so on GPUs.
    """
    train, infer = placements.get("train"), placements.get("infer")
    on_gpu = "bfloat16" in (cfg.trainer.dtype, cfg.engine.dtype)
    if train is not None and rank in train.ranks:
        compute_bytes = ITEM_BYTES[cfg.trainer.dtype]
        yield trainer_ledger(
            spec.num_parameters,
            train.axes["fsdp"],
            compute_bytes,
            num_gathered=_num_gathered(spec),
            activations=activation_bytes(
                num_tokens=cfg.trainer.max_tokens,
                num_layers=spec.num_layers,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
                logit_bytes=cfg.trainer.logit_rows * spec.vocab_size * ITEM_BYTES["float32"],
                slope_bytes=_slope_bytes(cfg.trainer, spec),
                element_bytes=compute_bytes,
                recompute=cfg.trainer.recompute,
            ),
        )
    if infer is not None and rank in infer.ranks:
        element_bytes = ITEM_BYTES[cfg.engine.dtype]
        token_bytes = kv_token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, element_bytes)
        weight_bytes = 0 if _aliased(rank, train, cfg) else element_bytes
        yield engine_ledger(
            spec.num_parameters,
            weight_bytes,
            _kv_tokens(infer, spec, cfg) * token_bytes,
            sleeps=train is not None and rank in train.ranks,
            step=_step_bytes(cfg.engine, spec) if on_gpu else 0,
        )
    routes = {pair: size for pair, size in moved.items() if rank in pair and pair != (rank, rank)}
    yield buckets_ledger(sum(min(size, BUCKET_BYTES) for size in routes.values()))
    if on_gpu:
        axes = train.axes if train is not None and rank in train.ranks else {}
        summed_by_peers = cfg.trainer.deterministic * (axes.get("fsdp", 1) - 1)
        num_peers = len({*chain(*routes)} - {rank}) + summed_by_peers
        yield device_ledger(_num_communicators(placements, moved), sum(size > 1 for size in axes.values()), num_peers)


def _num_communicators(placements: Placements, moved: Counter[tuple[int, int]]) -> int:
    """The world's, and three of each placement: of its axes dp and fsdp, and of all its ranks. A link is placed too."""
    seats = {(place.ranks, *place.axes.values()) for place in placements.values()}
    if moved:
        union = tuple(sorted({rank for place in placements.values() for rank in place.ranks}))
        seats.add((union, len(union), 1, 1))
    return 1 + 3 * len(seats)


def _step_bytes(cfg: EngineConfig, spec: ModelSpec) -> int:
    """One layer of as many tokens as a step takes, and twice the logits of a full batch."""
    return activation_bytes(
        num_tokens=cfg.max_step_tokens or max(cfg.max_batch, GPU_STEP_TOKENS),
        num_layers=1,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        logit_bytes=cfg.max_batch * spec.vocab_size * ITEM_BYTES["float32"],
        slope_bytes=0,
        element_bytes=ITEM_BYTES[cfg.dtype],
        recompute="none",
    )


def _slope_bytes(cfg: TrainerConfig, spec: ModelSpec) -> int:
    """What the head keeps for the backward pass: on a CPU, which computes in float32, little enough to leave out."""
    if cfg.dtype == "float32" or cfg.recompute == "all":
        return 0
    return cfg.max_tokens * spec.vocab_size * ITEM_BYTES[cfg.dtype]


def _num_gathered(spec: ModelSpec) -> int:
    """Parameters that FSDP holds whole at once: all of a small model; else the root's, and a layer with the next."""
    if spec.num_parameters * ITEM_BYTES["float32"] <= WHOLE_MODEL_BYTES:
        return spec.num_parameters
    layer = sum(prod(shape) for name, shape in spec.parameter_shapes().items() if name.startswith("model.layers.0."))
    return spec.num_parameters - (spec.num_layers - 2) * layer


def _kv_tokens(infer: Placement, spec: ModelSpec, cfg: Any) -> int:
    """Tokens whose keys and values one engine's pages hold: those given, else a full batch of whole contexts."""
    if cfg.engine.num_pages:
        return int(cfg.engine.num_pages * (cfg.engine.page_size or GPU_PAGE_SIZE))
    sequences = -(-cfg.prompts_per_step // infer.data_size) * cfg.sampling.num_samples
    return min(cfg.engine.max_batch, sequences) * spec.max_positions


def _aliased(rank: int, train: Placement | None, cfg: Any) -> bool:
    """Whether this rank's engine can be the trainer's own memory."""
    whole = train is not None and rank in train.ranks and train.axes["fsdp"] == 1
    return whole and cfg.engine.dtype == "float32"


def _route_bytes(placements: Placements, spec: ModelSpec | None, cfg: Any) -> Counter[tuple[int, int]]:
    """Bytes that a push moves, by (source rank, destination rank).

    The plan is made for one tensor of each shape, and counted as often as the shape occurs.
    """
    train, infer = placements.get("train"), placements.get("infer")
    if spec is None or train is None or infer is None:
        return Counter()
    shapes = Counter(spec.parameter_shapes().values())
    num_shards = train.axes["fsdp"]
    moved: Counter[tuple[int, int]] = Counter()
    for shape, count in shapes.items():
        whole = Piece("any", shape, cfg.engine.dtype, Box((0,) * len(shape), shape))
        shards = [Piece("any", shape, "float32", chunk_box(shape, i, num_shards)) for i in range(num_shards)]
        source = [Layout(rank, (shards[place % num_shards],)) for place, rank in enumerate(train.ranks)]
        for move in plan(source, [Layout(rank, (whole,)) for rank in infer.ranks]).moves:
            moved[move.src, move.dst] += move.num_bytes * count
    return moved


def _axis_groups(place: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of ranks that differ in one axis alone, for axes of more than one rank."""
    dp, fsdp = place.axes["dp"], place.axes["fsdp"]
    groups = []
    if fsdp > 1:
        groups += [("fsdp", place.ranks[i * fsdp : (i + 1) * fsdp]) for i in range(dp)]
    if dp > 1:
        groups += [("dp", place.ranks[i::fsdp]) for i in range(fsdp)]
    return groups
