"""The forward pass of a Megatron-core trainer over packed micro-batches, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.replay.backend_pass import BackendPass
from spmd_rl.microscope.taps.megatron_hooks import hook_megatron
from spmd_rl.model.hf import model_weights
from spmd_rl.model.read import read_spec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig


class MegatronPass(BackendPass):
    """A Megatron-core trainer without gradients, whatever axes the run had."""

    name = "megatron"

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        context: RoleContext,
        *,
        logit_rows: int = 2048,
        model_options: Mapping[str, Any] = {},
        row_shards: int = 1,
        **settings: Any,
    ) -> None:
        """It sums as `row_shards` says (model/spec.py). `settings` are those of any backend."""
        spec = replace(read_spec(folder), row_shards=row_shards)
        name = dtype_of(str(dtype).removeprefix("torch."), context.device)
        cfg = TrainerConfig(
            backend=MegatronConfig(model_options=dict(model_options)),
            dtype=name,
            logit_rows=logit_rows,
        )
        backend = Megatron(spec, context, cfg)
        backend.fill(model_weights(folder, spec.parameter_shapes()))
        hooked = partial(hook_megatron, backend)
        super().__init__(backend, hooked, spec, dtype, context.device, **settings)
