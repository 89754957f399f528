"""Routes of a run's weight push, from its placements and settings, without any process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.low_precision.coded_weights import coded_shapes
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.roles import INFER, TRAIN
from spmd_rl.plan.routes import Routes, Wanted, push_routes, routes_of_experts, whole
from spmd_rl.rollout.kinds import EngineConfig, kind_of
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.memory import dtype_on_gpu
from spmd_rl.types.code_layout import LAYOUTS
from spmd_rl.weights.plan.layout import Box, Dims


def routes_of_run(
    placements: Placements, spec: ModelSpec, needs: RunNeeds, world_size: int
) -> Routes:
    """Return the routes of a push; none where the run has no trainer or no engine."""
    infer, trainer, engine = placements.get(INFER), needs.trainer, needs.engine
    train = _holders(placements, trainer)
    if train is None or infer is None or trainer is None or engine is None:
        return Routes.none(world_size)
    shapes, tp = trainer.lora.of_engine.trained_shapes(spec), infer.axes["tp"]
    dtype, ep = dtype_on_gpu(engine), train.axes.get("ep", 1)
    if infer.axes.get("ep", 1) > 1 or (ep > 1 and train.size == train.data_size):
        return routes_of_experts(train, infer, spec, dtype, world_size, engine.weights)
    if engine.weights != "full":
        return _routes_of_codes(
            train, infer, shapes, coded_shapes(spec, engine.weights), engine, world_size
        )
    wanted = [kind_of(engine).boxes(spec, rank, tp) for rank in range(tp)] if tp > 1 else []
    given = _given_boxes(train, trainer, spec)
    return push_routes(train, infer, _kinds(shapes, wanted, given), dtype, world_size)


def _kinds(
    shapes: Mapping[str, Dims],
    wanted: Sequence[Mapping[str, Box]],
    given: Mapping[str, tuple[Box, ...]],
) -> Counter[Wanted]:
    """Return the number of tensors of each kind. Without boxes in `wanted`, all want all."""
    alike = Counter(  # a mixture has tens of thousands of tensors, of few kinds
        (shape, tuple(of_rank[name] for of_rank in wanted), given.get(name, ()))
        for name, shape in shapes.items()
    )
    found = Counter[Wanted]()
    for (shape, boxes, own), number in alike.items():
        found[Wanted(shape, boxes or whole(shape).boxes, own)] += number
    return found


def _given_boxes(
    train: Placement, trainer: TrainerConfig, spec: ModelSpec
) -> dict[str, tuple[Box, ...]]:
    """Return the boxes that ranks of FSDP2 along tp have of each parameter, each once."""
    tp = train.axes["tp"]
    if tp == 1 or trainer.backend.kind != "fsdp2":
        return {}
    parts = [ModelPart(rank, tp, trains=True).boxes(spec) for rank in range(tp)]
    return {name: tuple(dict.fromkeys(part[name] for part in parts)) for name in parts[0]}


def _routes_of_codes(
    train: Placement,
    infer: Placement,
    shapes: Mapping[str, Dims],
    coded: Mapping[str, Dims],
    engine: EngineConfig,
    world_size: int,
) -> Routes:
    """Return the routes of weights of which some are codes.

    Scales are not counted: they are at most a thirtieth of their codes.
    """
    layout = LAYOUTS[engine.weights]
    codes = Counter(whole(layout.code_shape(coded[name])) for name in shapes.keys() & coded.keys())
    others = Counter(whole(shape) for name, shape in shapes.items() if name not in coded)
    routes = push_routes(train, infer, codes, layout.code_dtype, world_size)
    return routes + push_routes(train, infer, others, dtype_on_gpu(engine), world_size)


def _holders(placements: Placements, trainer: TrainerConfig | None) -> Placement | None:
    """Return the trainer's placement as its weights are cut."""
    train = placements.get(TRAIN)
    is_fsdp2 = trainer is not None and trainer.backend.kind == "fsdp2"
    return train.of_shards if train is not None and is_fsdp2 else train
