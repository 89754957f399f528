"""The forward pass of a Megatron-core trainer over packed micro-batches, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import begin_micro_batch, micro_batches_of
from spmd_rl.microscope.taps.megatron_hooks import hook_megatron
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.hf import model_weights
from spmd_rl.model.read import read_spec
from spmd_rl.train.backend import Outputs
from spmd_rl.train.batch_runner import NOTHING_ELSE
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.microbatch import lay_out


class MegatronPass:
    """A Megatron-core trainer without gradients, whatever axes the run had."""

    name = "megatron"
    is_recorded = False
    model = None
    split = 0

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        context: RoleContext,
        *,
        max_tokens: int = 16384,
        logit_rows: int = 2048,
        model_options: Mapping[str, Any] = {},
        share_prompts: bool = True,
        row_shards: int = 1,
    ) -> None:
        """It sums as `row_shards` says (model/spec.py).

        Without `share_prompts`, each sequence is a micro-batch and computes its own prompt.
        """
        spec = replace(read_spec(folder), row_shards=row_shards)
        name = dtype_of(str(dtype).removeprefix("torch."), context.device)
        backend = MegatronConfig(model_options=dict(model_options))
        cfg = TrainerConfig(backend=backend, dtype=name, logit_rows=logit_rows)
        self.backend = Megatron(spec, context, cfg)
        self.backend.fill(model_weights(folder, spec.parameter_shapes()))
        self.device, self.dtype = context.device, dtype
        self.num_layers, self.max_tokens = spec.num_layers, max_tokens
        self.share_prompts = share_prompts
        self.rows_are_distinct = self.device.type != "cpu" or not share_prompts
        self.facts: dict[str, int] = {}
        self.problems: list[str] = []

    def run(self, case: ReplayCase, tap: Tap) -> None:
        parts = micro_batches_of(case, self.max_tokens, self.share_prompts)
        self.facts = {"micro-batches": len(parts)}

        def on_outputs(number: int, outputs: Outputs) -> None:
            assert isinstance(outputs.logprobs, Tensor)
            tap.observe(Point(self.num_layers, "logprob"), outputs.logprobs)

        with hook_megatron(self.backend, tap.observe):
            for part in parts:
                begin_micro_batch(case, tap, part, self.device)
                self.backend.forward([lay_out(part, self.device)], on_outputs, NOTHING_ELSE)
