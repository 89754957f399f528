"""From a trainer's config to a model on its ranks, ready to learn."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.place import Place
from spmd_rl.model.hf import init_weights, load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2 import Fsdp2
from spmd_rl.train.learner import Learner


def build(cfg: TrainerConfig, place: Place) -> Learner:
    """The model of `cfg.model`, sharded over the role's ranks.

    Ranks: all of the role. Raises: ConfigError if the model folder does not serve.
    """
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, place.device))
    return Learner(Fsdp2(_model(cfg), place.mesh, cfg, place.device), place, cfg)


def _model(cfg: TrainerConfig) -> CausalLM:
    if not cfg.model:
        raise ConfigError("trainer.model is empty: name a Hugging Face model folder")
    spec = ModelSpec.from_folder(cfg.model)
    model = CausalLM(spec)
    if cfg.init == "random":
        init_weights(model, spec, cfg.seed)
    else:
        load_weights(model, cfg.model)
    return model
