"""Check of what roles have of a split, and of what they share, before a run. No torch."""

from __future__ import annotations

import operator

from spmd_rl.config.combinations import ON, Combination, compared, refuse
from spmd_rl.mesh.axes import DATA, MODEL, size_of
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import Head
from spmd_rl.plan.needs import INFER, TRAIN, RunNeeds
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.kinds import kind_of as kind_of_engine
from spmd_rl.train.fsdp2.axes import ADVICE
from spmd_rl.train.kinds import kind_of
from spmd_rl.train.refusals import FOREIGN_REFUSED

ROW_SHARDS_REFUSED = tuple(
    Combination(
        {
            f"split.{name}.tp": compared("above", "run.row_shards", operator.gt),
            "run.row_shards": ON,
        },
        "{1} is less than {0}: set it to {0.value} or 0",
    )
    for name in (TRAIN, INFER)
)


def check_axes(needs: RunNeeds, placements: Placements) -> None:
    """Check the axes of every role of a run.

    Raises: ConfigError or PlanError, one sentence, for a role without an axis that the split gives
    it, a model that cannot be cut along the axes, or a trainer that pushes to an engine of other
    formats.
    """
    check_together(needs, placements)
    trainer, engine, model = needs.trainer, needs.engine, needs.model
    extra = {role.name for role in needs.extra_roles()}
    for name, placement in placements.items():
        if name == INFER and engine is not None:
            _check_engine(engine, placement, model)
        elif name == TRAIN and trainer is not None:
            kind_of(trainer, _head(needs)).check_axes(trainer, placement, model)
        elif name not in extra:
            placement.require_axes("this role", DATA, ADVICE)
    for role in needs.extra_roles():
        role.check_axes(placements)


def _head(needs: RunNeeds) -> Head:
    return getattr(needs.trainer_role, "HEAD", "lm")


def check_together(needs: RunNeeds, placements: Placements) -> None:
    """Check what trainer and engine have of the split, and of each other's settings.

    Raises: ConfigError for settings that do not go together, and for a `run.row_shards` that the
    model cannot have.
    """
    shards, model = needs.run.row_shards, needs.model
    settings = {
        "split": {name: _sizes(placement) for name, placement in placements.items()},
        "run": {"row_shards": shards},
        "engine": needs.engine,
        "trainer": needs.trainer if needs.pushes or needs.engine is None else None,
        "model": model,
        "model.head": _head(needs),
        "sampling": needs.sampling,
    }
    if model:
        spec = read_spec(model)
        settings |= {
            "model.num_experts": spec.num_experts,
            "model.whole_layers": spec.whole_layers,
            "model.corrections": spec.fixed_names(),
            "model.impl": spec.impl,
        }
    refuse((*ROW_SHARDS_REFUSED, *FOREIGN_REFUSED), settings)
    if needs.engine is not None:
        refuse(kind_of_engine(needs.engine).refused, settings)
    if needs.trainer is not None:
        refuse(kind_of(needs.trainer, _head(needs)).refused, settings)
    if shards > 1 and model:
        check_parts(read_spec(model), shards, f"run.row_shards = {shards}")


def _sizes(placement: Placement) -> dict[str, int]:
    """Return the ranks along each axis that a trainer may have."""
    return {axis: size_of(placement.axes, axis) for axis in (*DATA, *MODEL)}


def _check_engine(engine: EngineConfig, placement: Placement, model: str) -> None:
    """Raise an error for an engine without an axis that the split gives it, or a model that its
    ranks cannot share.
    """
    kind = kind_of_engine(engine)
    placement.require_axes(kind.name, kind.axes, kind.advice)
    if model:
        spec, ep = read_spec(model), size_of(placement.axes, "ep")
        kind.check_tp(spec, placement.axes["tp"])
        if ep > 1:
            check_shares(spec, ep, f"split.{placement.name}.ep = {ep}")
