"""What layers keep for their backward pass, and where: as the settings of FSDP2 say."""

from __future__ import annotations

from typing import Literal

import torch

from spmd_rl.kernels import recomputing
from spmd_rl.kernels.runtime.first_pass import computed_again
from spmd_rl.model.network import CausalLM
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.config import Fsdp2Config
from spmd_rl.train.fsdp2.activation_offload import ActivationOffload


def keep_less(
    model: CausalLM, settings: Fsdp2Config, device: torch.device, memory: RoleMemory
) -> ActivationOffload | None:
    """Have the layers of a model keep less on the GPU; return what brings the rest back."""
    _recompute(model, settings.recompute)
    if not settings.offload_activations:
        return None
    offload = ActivationOffload(device, memory.reserve)
    offload.wrap(model.layers)
    return offload


def _recompute(model: CausalLM, what: Literal["none", "cheap", "all"]) -> None:
    """Have each layer keep for its backward pass everything, all but cheap ops, or its input alone.

    A layer with experts keeps its routes too.
    The forward method is wrapped and not the module, so that parameters keep their names.
    """
    for layer in model.layers:
        if what == "cheap":
            layer.forward = recomputing()(layer.forward)
        elif what == "all":
            layer.forward = computed_again(layer.forward)
