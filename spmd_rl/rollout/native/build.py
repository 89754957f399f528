"""Builder of a native engine with its model, from the engine's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.model.hf import load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.weight_files import has_weights
from spmd_rl.rollout.engine import EngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

FOLDER_VERSION = 0


def build(
    cfg: EngineConfig, device: torch.device, decode: Callable[[tuple[int, ...]], str]
) -> NativeEngine:
    """Return the engine of `cfg.model`, with the folder's weights if `load_weights` asks for them.

    Raises: ConfigError if the model folder does not serve; ResidencyError if the host has too
    little memory.
    """
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, device))
    model = _model(cfg, device)
    try:
        engine = NativeEngine(model, cfg, device, decode=decode)
    except MemoryError:
        asked = f"engine.max_batch = {cfg.max_batch} and engine.num_pages = {cfg.num_pages}"
        raise ResidencyError(
            f"{asked} ask for more memory than this host has: lower them"
        ) from None
    if cfg.load_weights and has_weights(cfg.model):
        load_weights(model, cfg.model)
        engine.new_version(FOLDER_VERSION)
    return engine


def _model(cfg: EngineConfig, device: torch.device) -> CausalLM:
    """Return the model of the folder's config, its parameters in unset memory.

    `load_weights` or a push sets them.
    """
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(cfg.model))
    return model.to(getattr(torch, cfg.dtype)).to_empty(device=device).requires_grad_(False)
