"""The axis tp of FSDP2: what goes with it, before a run. No torch.

Its ranks share each matrix of a model: attention by heads, MLPs by hidden units, and embedding and
head by rows of the vocabulary.
"""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig


def check_tensor_axis(cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where ranks cannot share matrices with these settings of a trainer.

    `spec` is None where the model is not known.
    """
    check_shared_matrices(cfg.weights, placement, spec)
    tp = size_of(placement.axes, "tp")
    refused = {
        "lora.rank": (cfg.lora.rank, 0, "ranks that share matrices have no adapters"),
        "optimizer.kind": (cfg.optimizer.kind, "adamw", "other optimizers need whole matrices"),
    }
    for key, (value, allowed, reason) in refused.items():
        if tp > 1 and value != allowed:
            raise ConfigError(
                f"split.{placement.name}.tp = {tp} does not go with trainer.{key} = {value!r}: "
                f"{reason}"
            )


def check_shared_matrices(weights: str, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where ranks cannot share the matrices of a model, whether or not it
    learns.
    """
    tp = size_of(placement.axes, "tp")
    if tp == 1:
        return
    at = f"split.{placement.name}.tp = {tp}"
    if weights != "full":
        raise ConfigError(
            f"{at} does not go with trainer.weights = {weights!r}: ranks share weights in 16 or 32 "
            "bits alone"
        )
    if spec is None:
        return
    check_parts(spec, tp, at)
    for tensor in spec.distinct_tensors():
        cut = tensor.tp_cut
        if cut is not None and not cut.is_padded and cut.num_units % tp:
            raise ConfigError(
                f"{at} is more than the {cut.num_units} {cut.unit}, of which a trainer has no "
                "copies"
            )
