"""Check of a split's axes before a run: which roles may have which. No torch."""

from __future__ import annotations

from typing import Any

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.axes import MODEL
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.moe_spec import MoeSpec, read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig, check_layout


def spec_to_train(folder: str, trainer: object) -> ModelSpec:
    """Return the specification of a model folder, as a recipe's `trainer` settings read it.

    Megatron-core alone trains a mixture of experts. Raises: as `ModelSpec.from_folder`.
    """
    is_megatron = isinstance(trainer, TrainerConfig) and isinstance(trainer.backend, MegatronConfig)
    return read_spec(folder) if is_megatron else ModelSpec.from_folder(folder)


def check_axes(cfg: Any, placements: Placements) -> None:
    """Check the axes of every role of a recipe's config.

    Raises: ConfigError or PlanError, one sentence, for a role without an axis that the split gives
    it, or a model that cannot be cut along the axes.
    """
    trainer = getattr(cfg, "trainer", None)
    for placement in placements.values():
        if placement.name != "train" or not isinstance(trainer, TrainerConfig):
            placement.require_data_axes_alone("this role")
        elif not isinstance(trainer.backend, MegatronConfig):
            placement.require_data_axes_alone("FSDP2")
        elif model := getattr(cfg, "model", ""):
            spec = read_spec(model)
            check_layout(spec, placement.axes, trainer.backend, placement.name)
            if isinstance(spec, MoeSpec) and "infer" in placements:
                raise ConfigError(
                    f"{model} is a mixture of experts, which no engine generates with here: train "
                    "it with a recipe that has no engine, such as sft"
                )
    for role in cfg.extra_roles() if hasattr(cfg, "extra_roles") else ():
        if isinstance(role.cfg, FrozenConfig | TrainerConfig):
            _check_beside(role.name, role.placement(placements))


def _check_beside(name: str, placement: Placement) -> None:
    """Raise a PlanError for a role of FSDP2 on ranks that a trainer cuts along other axes."""
    for axis in MODEL:
        if (size := placement.axes.get(axis, 1)) > 1:
            raise PlanError(
                f"split.{placement.name}.{axis} = {size}: the role '{name}' shares these ranks and "
                f"has the axes dp and fsdp alone, so set split.{name}.ranks to ranks of its own"
            )
