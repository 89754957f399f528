"""Whether a model has the loss that balances the loads of experts. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig


def has_balance(spec: ModelSpec, cfg: TrainerConfig) -> bool:
    """Return whether a trainer of this model has the loss.

    Raises: ConfigError where no softmax chooses the experts that it is to balance.
    """
    coef = cfg.router_aux_loss_coef
    has_softmax = any(isinstance(one, Moe) and not one.sigmoid for one in spec.distinct_layers())
    if coef and not has_softmax:
        raise ConfigError(
            f"trainer.router_aux_loss_coef = {coef:g}: a model of {spec.family} has no routers "
            "with a softmax, which this loss is for: set it to 0"
        )
    return coef > 0
