"""Check of what roles have of a split, and of what they share, before a run. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.formats.coded_cache import check_alike
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import Head
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.kinds import kind_of as kind_of_engine
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.tp.refusals import check_shared
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.axes import ADVICE
from spmd_rl.train.kinds import kind_of


def check_axes(needs: RunNeeds, placements: Placements) -> None:
    """Check the axes of every role of a run.

    Raises: ConfigError or PlanError, one sentence, for a role without an axis that the split gives
    it, a model that cannot be cut along the axes, or a trainer that pushes to an engine of other
    formats.
    """
    trainer, engine, model = needs.trainer, needs.engine, needs.model
    extra = {role.name for role in needs.extra_roles()}
    check_row_shards(needs, placements)
    for placement in placements.values():
        if placement.name == "infer" and engine is not None:
            _check_engine(engine, placement, model, trainer)
        elif placement.name == "train" and trainer is not None:
            head: Head = getattr(needs.trainer_role, "HEAD", "lm")
            kind_of(trainer, head).check_axes(trainer, placement, model)
        elif placement.name not in extra:
            placement.require_axes("this role", DATA, ADVICE)
    if needs.pushes and trainer is not None and engine is not None and "train" in placements:
        check_alike(engine, trainer)
    if model and engine is not None and read_spec(model).num_experts:
        _check_mixture(model, engine, trainer)
    for role in needs.extra_roles():
        role.check_axes(placements)


def check_row_shards(needs: RunNeeds, placements: Placements) -> None:
    """Raise a ConfigError for a `run.row_shards` that is less than a tp, or that a model, an engine
    or a trainer of the run cannot have.
    """
    shards = needs.run.row_shards
    at = f"run.row_shards = {shards}"
    for name, placement in placements.items():
        if shards and (tp := placement.axes["tp"]) > shards:
            raise ConfigError(f"{at} is less than split.{name}.tp = {tp}: set it to {tp} or 0")
    if shards > 1:
        if needs.model:
            check_parts(read_spec(needs.model), shards, at)
        _check_formats(needs.engine, needs.trainer, at)
        _check_sums(at, needs.trainer)


def _check_formats(engine: EngineConfig | None, trainer: TrainerConfig | None, at: str) -> None:
    """Raise a ConfigError that begins with `at` for what has no sums in several parts."""
    if engine is not None and engine.promises_bits:
        check_shared(engine.weights, at, trainer is not None and trainer.lora.of_engine.rank > 0)
    if trainer is not None and trainer.weights != "full":
        raise ConfigError(
            f"{at} does not go with trainer.weights = {trainer.weights!r}, whose products have one "
            "part: set it to 'full'"
        )


def _check_engine(
    engine: EngineConfig, placement: Placement, model: str, trainer: TrainerConfig | None
) -> None:
    """Raise an error for an engine without an axis that the split gives it, or one that does not go
    with the model or with what is pushed.
    """
    kind = kind_of_engine(engine)
    placement.require_axes(kind.name, kind.axes, kind.advice)
    tp = placement.axes["tp"]
    if model:
        kind.check_tp(read_spec(model), tp)
    if isinstance(engine, NativeEngineConfig) and tp > 1:
        at = f"split.infer.tp = {tp}"
        has_adapters = trainer is not None and trainer.lora.of_engine.rank > 0
        check_shared(engine.weights, at, has_adapters)
        _check_sums(at, trainer)
    ep = placement.axes.get("ep", 1)
    if ep == 1:
        return
    at = f"split.{placement.name}.ep = {ep}"
    if tp > 1:
        raise ConfigError(
            f"{at} does not go with split.{placement.name}.tp = {tp}, whose ranks share experts "
            "too: set ep to 1"
        )
    if model:
        check_shares(read_spec(model), ep, at)
    if trainer is not None and trainer.lora.of_engine.rank:
        raise ConfigError(
            f"{at} does not go with adapters that are pushed alone: set "
            "trainer.lora.merged_push = true, so that a push brings whole weights"
        )


def _check_sums(at: str, trainer: TrainerConfig | None) -> None:
    """Raise a ConfigError that begins with `at` for a trainer that does not sum as ranks of a
    native engine do.
    """
    if trainer is not None and not trainer.backend.sums_in_parts:
        raise ConfigError(
            f"{at}: transformer-engine's layers do not sum products as ranks that "
            "share a native engine do: set trainer.backend.layers = 'local'"
        )


def _check_mixture(model: str, engine: EngineConfig, trainer: TrainerConfig | None) -> None:
    """Raise a ConfigError for an engine or a trainer that cannot have the model's experts."""
    if not engine.takes_corrections and read_spec(model).fixed_names():
        raise ConfigError(
            f"{model} has routers with corrections, which engine.kind = '{engine.kind}' does not "
            "support here: set engine.kind = 'native'"
        )
    if trainer is not None and not trainer.backend.mixtures_beside_engines:
        raise ConfigError(
            f"{model} is a mixture of experts, which '{trainer.backend.kind}' trains only in "
            "recipes without an engine, such as sft: set trainer.backend.kind = 'fsdp2'"
        )
