"""The axes of FSDP2, and what goes with them, before a run. No torch."""

from __future__ import annotations

from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.expert_axis import check_expert_axis
from spmd_rl.train.fsdp2.sequence_axis import check_sequence_axis

AXES = (*DATA, "cp", "ep")
ADVICE = 'a trainer with trainer.backend.kind = "megatron" has this one too'


def check_axes(cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError or PlanError for axes that FSDP2 does not have with these settings.

    `spec` is None where the model is not known.
    """
    placement.require_axes("FSDP2", AXES, ADVICE)
    check_sequence_axis(cfg, placement, spec)
    check_expert_axis(cfg, placement, spec)
