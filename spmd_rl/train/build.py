"""Builds a trainer: a model on its ranks, ready to learn, from a config and a model folder."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import model_weights, random_weights
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2 import Fsdp2
from spmd_rl.train.learner import Learner


def build(cfg: TrainerConfig, folder: str, context: RoleContext) -> Learner:
    """Build the model in a Hugging Face folder, sharded over the role's ranks.

    A rank holds its part, and while weights are read one whole tensor at a time.

    Ranks: all of the role. Raises: ConfigError if the model folder does not serve.
    """
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, context.device))
    if not folder:
        raise ConfigError("model is empty: name a Hugging Face model folder")
    spec = ModelSpec.from_folder(folder)
    backend = Fsdp2(spec, context.mesh, cfg, context.device)
    backend.fill(
        random_weights(spec, cfg.seed)
        if cfg.init == "random"
        else model_weights(folder, spec.parameter_shapes())
    )
    return Learner(backend, context, cfg)
