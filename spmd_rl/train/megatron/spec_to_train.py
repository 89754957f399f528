"""Specification of the model that a trainer reads from a folder, by its backend. No torch."""

from __future__ import annotations

from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig


def spec_to_train(folder: str, trainer: object) -> ModelSpec:
    """Return the specification of a model folder, as a recipe's `trainer` settings read it.

    Megatron-core alone trains a mixture of experts. Raises: as `ModelSpec.from_folder`.
    """
    is_megatron = isinstance(trainer, TrainerConfig) and isinstance(trainer.backend, MegatronConfig)
    spec = read_spec(folder)
    return spec if is_megatron else spec.require_network()
