"""The forward passes of trainers' backends: FSDP2 on one of its ranks, and Megatron-core on one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config.dump import as_data
from spmd_rl.config.load import from_data
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.replay.forward_pass import MicroBatchPass
from spmd_rl.microscope.taps.hooks import Observe, hook_model
from spmd_rl.microscope.taps.megatron_hooks import hook_megatron
from spmd_rl.model.hf import model_weights
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.read import read_spec
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.backend import Backend, Outputs
from spmd_rl.train.batch_runner import NOTHING_ELSE
from spmd_rl.train.build import build_fsdp2
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.backend import Fsdp2
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.microbatch import MicroBatch


def _score(backend: Backend, micro: MicroBatch) -> Tensor:
    """Return the log-probs that a backend gives without gradients."""
    scored: list[Tensor] = []

    def on_outputs(number: int, outputs: Outputs) -> None:
        assert isinstance(outputs.logprobs, Tensor)
        scored.append(outputs.logprobs)

    backend.forward([micro], on_outputs, NOTHING_ELSE)
    return scored[0]


class Fsdp2Pass(MicroBatchPass):
    """An FSDP2 trainer on one of the ranks that share its work."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        context: RoleContext,
        trainer: Mapping[str, Any],
        lora: LoraConfig,
    ) -> None:
        """Ranks: all of the role. `trainer` has a run's settings, `folder` the weights."""
        name = str(dtype).removeprefix("torch.")
        asked = {"init": "folder", "dtype": name, "lora": as_data(lora)}
        cfg = from_data(TrainerConfig, {**trainer, **asked, "freeze": [], "groups": []})
        memory = RoleMemory(None, context.device)
        backend = build_fsdp2(cfg, str(folder), context, "lm", memory).backend
        assert isinstance(backend, Fsdp2)
        self.backend = backend
        num_layers = backend.scorer.model.spec.num_layers
        super().__init__(num_layers, context.device, dtype, cfg.max_tokens, share_prompts=False)

    def hooked(self, observe: Observe) -> AbstractContextManager[None]:
        return hook_model(self.backend.scorer.model, observe)

    def score(self, micro: MicroBatch) -> Tensor:
        return _score(self.backend, micro)


class MegatronPass(MicroBatchPass):
    """A Megatron-core trainer on one rank, whatever axes the run had."""

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
        max_tokens: int = 16384,
        share_prompts: bool = True,
    ) -> None:
        """It sums as `row_shards` says (model/spec.py)."""
        spec = replace(read_spec(folder), row_shards=row_shards)
        super().__init__(spec.num_layers, context.device, dtype, max_tokens, share_prompts)
        cfg = TrainerConfig(
            backend=MegatronConfig(model_options=dict(model_options)),
            dtype=dtype_of(str(dtype).removeprefix("torch."), context.device),
            logit_rows=logit_rows,
        )
        self.backend = Megatron(spec, context, cfg)
        self.backend.fill(model_weights(folder, spec.parameter_shapes()))

    def hooked(self, observe: Observe) -> AbstractContextManager[None]:
        return hook_megatron(self.backend, observe)

    def score(self, micro: MicroBatch) -> Tensor:
        return _score(self.backend, micro)
