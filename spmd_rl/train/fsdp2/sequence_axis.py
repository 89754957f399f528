"""The axis cp of FSDP2: what goes with it, before a run. No torch.

Its ranks share the tokens of each sequence, and in attention the heads: those of a rank along tp,
where ranks share matrices too.
"""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec


def check_sequence_axis(balance_coef: float, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where the ranks along cp cannot share the heads of a model, or where it
    learns to balance its experts with a `balance_coef`.

    `spec` is None where the model is not known.
    """
    cp, tp = size_of(placement.axes, "cp"), size_of(placement.axes, "tp")
    if cp == 1:
        return
    at = f"split.{placement.name}.cp = {cp}"
    if balance_coef:
        raise ConfigError(
            f"{at} does not go with trainer.router_aux_loss_coef = {balance_coef:g}: "
            "that loss needs all tokens of a sequence on one rank"
        )
    for block in () if spec is None else spec.distinct_blocks():
        cache = block.cache(tp)
        if cache is None:
            continue
        if not cache.queries_per_key:
            raise ConfigError(f"{at}: a layer of the model has no heads that ranks could share")
        heads = cache.arrays[0][0]
        if heads % cp:
            noun = "head" if heads == 1 else "heads"
            where = (
                f"that split.{placement.name}.tp = {tp} leaves on a rank"
                if tp > 1
                else "of a layer"
            )
            raise ConfigError(f"{at} does not divide the {heads} key-value {noun} {where}")
