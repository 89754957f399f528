"""From an engine's config to a plain engine with its model."""

from __future__ import annotations

import torch

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.model.foreign.network import ForeignLM
from spmd_rl.model.foreign.weights import foreign_weights
from spmd_rl.model.hf import fill
from spmd_rl.model.read import read_spec
from spmd_rl.model.weight_files import has_weights
from spmd_rl.rollout.plain.config import PlainEngineConfig
from spmd_rl.rollout.plain.engine import Decode, PlainEngine

FOLDER_VERSION = 0


def build(cfg: PlainEngineConfig, model: str, device: torch.device, decode: Decode) -> PlainEngine:
    """Build an engine for a model that `transformers` computes, with the weights of its folder
    where it has some and the config asks for them.

    Raises: ConfigError if the model folder does not serve.
    """
    dtype = getattr(torch, dtype_of(cfg.dtype, device))
    network = ForeignLM(read_spec(model), model).materialise(device, dtype)
    engine = PlainEngine(network, cfg.max_batch, dtype, device, decode)
    if cfg.load_weights and has_weights(model):
        fill(network, foreign_weights(model))
        engine.sink().commit(FOLDER_VERSION)
    return engine
