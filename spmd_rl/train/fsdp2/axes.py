"""The axes of FSDP2, and what goes with them, before a run. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.fsdp2.expert_axis import check_expert_axis, check_shared_experts
from spmd_rl.train.fsdp2.sequence_axis import check_sequence_axis
from spmd_rl.train.fsdp2.tensor_axis import check_shared_matrices, check_tensor_axis

AXES = (*DATA, "cp", "tp", "ep")
ADVICE = 'a trainer with trainer.backend.kind = "megatron" has this one too'
FROZEN_ADVICE = "give the role ranks of its own"


def check_axes(cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError or PlanError for axes that a trainer of FSDP2 does not have with these
    settings.

    `spec` is None where the model is not known.
    """
    placement.require_axes("FSDP2", AXES, ADVICE)
    _check_parts(cfg.data_parts, placement)
    check_expert_axis(cfg, placement, spec)
    check_tensor_axis(cfg, placement, spec)
    check_sequence_axis(cfg.router_aux_loss_coef, placement, spec)


def check_frozen_axes(cfg: FrozenConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError or PlanError for axes that a model that never learns does not have."""
    placement.require_axes("a frozen model", AXES, FROZEN_ADVICE)
    check_shared_experts(cfg.wrap, placement, spec)
    check_shared_matrices(cfg.weights, placement, spec)
    check_sequence_axis(0.0, placement, spec)


def _check_parts(num_parts: int, placement: Placement) -> None:
    """Raise a ConfigError where the ranks cannot have equally many parts in a tree of sums."""
    ranks = placement.data_size
    if num_parts and (num_parts % ranks or (ranks != num_parts and ranks & (ranks - 1))):
        raise ConfigError(
            f"trainer.data_parts = {num_parts}: the data is split over {ranks} ranks of "
            f"'{placement.name}', which must be as many or a power of two that divides it"
        )
