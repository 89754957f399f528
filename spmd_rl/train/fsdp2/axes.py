"""The axes of FSDP2, and what goes with them, before a run. No torch.

Along `ep`, ranks share the experts of each mixture, and each has a block of them, one after the
other. The ranks that have the same block are those along `edp`. They shard it. Along `tp`, ranks
share each matrix: attention by heads, MLPs by hidden units, and embedding and head by rows of the
vocabulary. Along `cp`, ranks share the tokens of each sequence, and in attention the heads: those
of a rank along tp, where ranks share matrices too.
"""

from __future__ import annotations

from spmd_rl.config.combinations import refuse
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import DATA, size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import FrozenConfig, TrainerConfig, fsdp2_settings
from spmd_rl.train.refusals import AXES_REFUSED

AXES = (*DATA, "cp", "tp", "ep")
ADVICE = 'a trainer with trainer.backend.kind = "megatron" has this one too'
FROZEN_ADVICE = "give the role ranks of its own"


def check_axes(cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError or PlanError for axes that a trainer of FSDP2 does not have with these
    settings.

    `spec` is None where the model is not known.
    """
    placement.require_axes("FSDP2", AXES, ADVICE)
    fsdp2_settings(cfg)
    _check_data_parts(cfg.data_parts, placement)
    _check_shares(cfg, placement, spec)


def check_frozen_axes(cfg: FrozenConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError or PlanError for axes that a model that never learns does not have."""
    placement.require_axes("a frozen model", AXES, FROZEN_ADVICE)
    _check_shares({"weights": cfg.weights, "backend": cfg}, placement, spec)


def _check_shares(trainer: object, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where ranks cannot share a model with these settings of its role."""
    axes, name = placement.axes, placement.name
    settings = {"trainer": trainer, "split": {"train": axes}, "model": spec}
    refuse(AXES_REFUSED, settings, name)
    if spec is None:
        return
    if (ep := size_of(axes, "ep")) > 1:
        check_shares(spec, ep, f"split.{name}.ep = {ep}")
    if (tp := size_of(axes, "tp")) > 1:
        _check_matrices(spec, tp, f"split.{name}.tp = {tp}")
    _check_heads(spec, placement)


def _check_data_parts(num_parts: int, placement: Placement) -> None:
    """Raise a ConfigError where the ranks cannot have equally many parts in a tree of sums."""
    ranks = placement.data_size
    if num_parts and (num_parts % ranks or (ranks != num_parts and ranks & (ranks - 1))):
        raise ConfigError(
            f"trainer.data_parts = {num_parts}: the data is split over {ranks} ranks of "
            f"'{placement.name}', which must be as many or a power of two that divides it"
        )


def _check_matrices(spec: ModelSpec, tp: int, at: str) -> None:
    """Raise a ConfigError for a model whose gradients `tp` ranks cannot share."""
    check_parts(spec, tp, at)
    for tensor in spec.distinct_tensors():
        cut = tensor.tp_cut
        if cut is not None and not cut.is_padded and cut.num_units % tp:
            raise ConfigError(
                f"{at} is more than the {cut.num_units} {cut.unit}, of which a trainer has no "
                "copies"
            )


def _check_heads(spec: ModelSpec, placement: Placement) -> None:
    """Raise a ConfigError where the ranks along cp cannot share the heads of a model."""
    cp, tp = size_of(placement.axes, "cp"), size_of(placement.axes, "tp")
    at = f"split.{placement.name}.cp = {cp}"
    for block in spec.distinct_blocks() if cp > 1 else ():
        cache = block.cache(tp)
        if cache is None:
            continue
        if not cache.queries_per_key:
            raise ConfigError(f"{at}: a layer of the model has no heads that ranks could share")
        heads = cache.arrays[0][0]
        if heads % cp:
            noun = "head" if heads == 1 else "heads"
            on_rank = f"that split.{placement.name}.tp = {tp} leaves on a rank"
            where = on_rank if tp > 1 else "of a layer"
            raise ConfigError(f"{at} does not divide the {heads} key-value {noun} {where}")
