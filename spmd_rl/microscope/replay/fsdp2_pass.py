"""The forward pass of an FSDP2 trainer on one of the ranks that share its work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config.dump import as_data
from spmd_rl.config.load import from_data
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.replay.backend_pass import BackendPass
from spmd_rl.microscope.taps.hooks import hook_model
from spmd_rl.model.lora import LoraConfig
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.build import build_fsdp2
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.backend import Fsdp2


def fsdp2_pass(
    folder: Path,
    dtype: torch.dtype,
    context: RoleContext,
    trainer: Mapping[str, Any],
    lora: LoraConfig,
) -> BackendPass:
    """Return the pass of a trainer with a run's settings, over the weights in `folder`.

    Ranks: all of the role.
    """
    asked = {"init": "folder", "dtype": str(dtype).removeprefix("torch."), "lora": as_data(lora)}
    cfg = from_data(TrainerConfig, {**trainer, **asked, "freeze": [], "groups": []})
    memory = RoleMemory(None, context.device)
    backend = build_fsdp2(cfg, str(folder), context, "lm", memory).backend
    assert isinstance(backend, Fsdp2)
    model = backend.scorer.model
    hooked = partial(hook_model, model)
    return BackendPass(
        backend, hooked, model.spec, dtype, context.device, cfg.max_tokens, share_prompts=False
    )
