"""Check of a split's axes before a run: which roles may have which. No torch."""

from __future__ import annotations

from typing import Any

from spmd_rl.mesh.split import Placements
from spmd_rl.model.moe_spec import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
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
            check_layout(read_spec(model), placement.axes, trainer.backend, placement.name)
