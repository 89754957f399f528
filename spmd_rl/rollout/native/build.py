"""From an engine's config to a native engine with its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.model.formats.coded_cache import kv_exponents
from spmd_rl.model.formats.coded_tensors import as_codes, hold_codes
from spmd_rl.model.hf import fill, load_weights, model_weights, random_weights
from spmd_rl.model.layers.moe_module import mixtures
from spmd_rl.model.lora import NO_LORA, AdaptedBase
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.model.read import read_spec
from spmd_rl.model.slab_parameters import fill_slab
from spmd_rl.model.weight_files import has_weights
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.engine_memory import WEIGHTS
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks

FOLDER_VERSION = 0


def build(
    cfg: NativeEngineConfig,
    folder: str,
    device: torch.device,
    decode: Callable[[tuple[int, ...]], str],
    reserved_bytes: int = 0,
    memory: RoleMemory | None = None,
    adapted: AdaptedBase | None = None,
    experts: ExpertRanks | None = None,
    part: ModelPart = WHOLE,
    row_shards: int = 1,
) -> NativeEngine:
    """Build an engine for the model in `folder`, with its weights where it has them and the config
    asks for them. Its weights and its keys and values are in regions of `memory`, if there is one.
    With `adapted`, it has the base from the first, and its adapters come by a push. The ranks of
    `experts` share the experts of each layer: their engines step together. So do those of ranks
    that each have a `part` of the model.

    Raises: ConfigError if the model folder does not serve; ResidencyError where the host has too
    little memory.
    """
    memory = memory or RoleMemory(None, device)
    lora = adapted.lora if adapted else NO_LORA
    spec = replace(read_spec(folder), row_shards=row_shards)
    with torch.device("meta"):
        model = CausalLM(spec, lora, kv_exponents(cfg), part)
    model = _materialise(model, cfg, device, memory, experts)
    try:
        engine = NativeEngine(
            model,
            cfg,
            device,
            decode=decode,
            reserved_bytes=reserved_bytes,
            memory=memory,
            experts=experts,
        )
    except MemoryError:
        asked = f"engine.max_batch = {cfg.max_batch} and engine.num_pages = {cfg.num_pages}"
        raise ResidencyError(
            f"{asked} ask for more memory than this host has: lower them"
        ) from None
    if adapted is not None:
        seed = adapted.random_seed
        shapes = spec.parameter_shapes()
        base = model_weights(folder, shapes) if seed is None else random_weights(spec, seed)
        fill(model, as_codes(base, spec, cfg.weights))
    elif cfg.load_weights and has_weights(folder):
        load_weights(model, folder, cfg.weights)
        engine.sink().commit(FOLDER_VERSION)
    return engine


def _share_experts(model: CausalLM, experts: ExpertRanks | None) -> None:
    """Have the mixtures of a model keep the experts of this rank, if ranks share them."""
    if experts is not None:
        for mixture in mixtures(model):
            mixture.split(experts.group)


def _materialise(
    model: CausalLM,
    cfg: NativeEngineConfig,
    device: torch.device,
    memory: RoleMemory,
    experts: ExpertRanks | None,
) -> CausalLM:
    """Return the model with parameters in unset memory: weights come by `load_weights` or a push.
    Adapters are not in the slab: they are small, and never sleep.
    """
    dtype = getattr(torch, dtype_of(cfg.dtype, device))
    with torch.device("meta"):
        model = model.to(dtype).requires_grad_(False)
        hold_codes(model, model.spec, cfg.weights)
        _share_experts(model, experts)
        if memory.sleeps:
            model.pack_projections()
    if not memory.sleeps:
        return model.to_empty(device=device)
    for adapter in model.adapters():
        adapter.to_empty(device=device)
    fill_slab(model, lambda num_bytes: memory.slab(WEIGHTS, "save", num_bytes).bytes)
    return model
