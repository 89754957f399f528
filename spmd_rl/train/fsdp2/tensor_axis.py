"""The axis tp of FSDP2: what goes with it, before a run. No torch.

Its ranks share each matrix of a model: attention by heads, MLPs by hidden units, and embedding and
head by rows of the vocabulary.
"""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.train.config import TrainerConfig


def check_tensor_axis(
    cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None, head: Head
) -> None:
    """Raise a ConfigError where ranks cannot share matrices with these settings.

    `spec` is None where the model is not known.
    """
    tp = size_of(placement.axes, "tp")
    if tp == 1:
        return
    at = f"split.{placement.name}.tp = {tp}"
    if head == "value":
        raise ConfigError(
            f"{at}: ranks do not share the matrices of a model with a value head: set it to 1"
        )
    if spec is not None:
        _check_model(spec, tp, at)
    refused = {
        "lora.rank": (cfg.lora.rank, 0, "ranks that share matrices have no adapters"),
        "weights": (cfg.weights, "full", "ranks share weights in 16 or 32 bits alone"),
        "optimizer.kind": (cfg.optimizer.kind, "adamw", "other optimizers need whole matrices"),
    }
    for key, (found, allowed, reason) in refused.items():
        if found != allowed:
            raise ConfigError(f"{at} does not go with trainer.{key} = {found!r}: {reason}")


def _check_model(spec: ModelSpec, tp: int, at: str) -> None:
    """Raise a ConfigError for a model whose gradients `tp` ranks cannot share."""
    check_parts(spec, tp, at)
    for one in spec.distinct_tensors():
        if one.cut is not None and one.cut.num_units % tp and not one.cut.is_padded:
            raise ConfigError(
                f"{at} is more than the {one.cut.num_units} {one.cut.unit}, of which a trainer has "
                "no copies"
            )
