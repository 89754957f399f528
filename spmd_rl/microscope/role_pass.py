"""Passes of the run's own roles: engine and trainer, with its settings, alone or on a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.replay.backend_pass import Fsdp2Pass
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import (
    ForwardPass,
    ReferencePass,
    TrainerPass,
    load_model,
)
from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.parts.part import WHOLE, row_shards_of_run
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
from spmd_rl.rollout.native.tp.build import part_of

SPLIT = "attention_split"
CACHE, EXPONENTS = "cache", "cache_exponents"
ENGINE_KEYS = (
    "page_size",
    "num_pages",
    "max_batch",
    "max_step_tokens",
    "max_prefill_ms",
    "prefix_cache",
    "cuda_graphs",
    CACHE,
    SPLIT,
)
TRAINER_KEYS = ("max_tokens", "logit_rows", "recompute", SPLIT)


def forward_pass(
    name: str,
    model: Path,
    dtype: torch.dtype,
    device: torch.device,
    settings: dict[str, Any],
    share_prompts: bool = True,
    lora: LoraConfig = NO_LORA,
    context: RoleContext | None = None,
) -> ForwardPass:
    """Return a pass that runs here. With `context`, it is that of one of the ranks that share it.

    Without `share_prompts`, each sequence computes its own prompt, because values of another
    program are patched in, whose prompts may differ from sequence to sequence.
    """
    if name == "transformers":
        return ReferencePass(model, dtype, device)
    trainer = settings.get("trainer", {})
    if name != "engine" and context is not None:
        return Fsdp2Pass(model, dtype, context, trainer, lora)
    role = settings.get("engine", {}) if name == "engine" else trainer
    load = partial(
        load_model,
        model,
        dtype,
        device,
        role.get("weights", "full"),
        _exponents(role),
        row_shards_of_run(settings),
        lora=lora,
    )
    if name == "engine":
        cfg, experts = _engine_config(role, share_prompts), _experts_of(context)
        part = WHOLE if context is None else part_of(context, records=False)
        network = load(holds=True, part=part, experts=experts and experts.group)
        return EnginePass(network, cfg, experts)
    trainer = trainer | trainer.get("backend", {})
    keys = {key: trainer[key] for key in TRAINER_KEYS if key in trainer}
    return TrainerPass(load(), **keys, share_prompts=share_prompts)


def _experts_of(context: RoleContext | None) -> ExpertRanks | None:
    """Return the ranks that share the experts of an engine."""
    if context is None or size_of(context.placement.axes, "ep") == 1:
        return None
    return ExpertRanks(context.axis_group(("ep",)), are_of_one_host=True)


def _exponents(role: dict[str, Any]) -> Exponents | None:
    """Return the scales of a role's keys and values in 8 bits; None where they are not."""
    keys, values = role.get(EXPONENTS, (0, 0))
    return (keys, values) if role.get(CACHE, "full") != "full" else None


def _engine_config(engine: dict[str, Any], share_prompts: bool) -> NativeEngineConfig:
    cfg = {key: engine[key] for key in ENGINE_KEYS if key in engine}
    cfg[EXPONENTS] = _exponents(engine) or (0, 0)
    if not share_prompts:
        cfg["prefix_cache"] = False
    return NativeEngineConfig(**cfg)
