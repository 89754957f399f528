"""The forward pass of a trainer's backend over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import begin_micro_batch, micro_batches_of
from spmd_rl.microscope.taps.hooks import Observe
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import Backend, Outputs
from spmd_rl.train.batch_runner import NOTHING_ELSE
from spmd_rl.train.microbatch import lay_out


class BackendPass:
    """A trainer's backend without gradients, whose ops pass what `hooked` is given."""

    name = "trainer"
    is_recorded = False
    model = None
    split = 0

    def __init__(
        self,
        backend: Backend,
        hooked: Callable[[Observe], AbstractContextManager[None]],
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int = 16384,
        share_prompts: bool = True,
    ) -> None:
        """Without `share_prompts`, each sequence is a micro-batch and computes its own prompt."""
        self.backend, self.spec = backend, spec
        self.dtype, self.device = dtype, device
        self.max_tokens, self.share_prompts = max_tokens, share_prompts
        self.rows_are_distinct = self.device.type != "cpu" or not share_prompts
        self.facts: dict[str, int] = {}
        self.problems: list[str] = []
        self._hooked = hooked

    def run(self, case: ReplayCase, tap: Tap) -> None:
        parts = micro_batches_of(case, self.max_tokens, self.share_prompts)
        self.facts = {"micro-batches": len(parts)}

        def on_outputs(number: int, outputs: Outputs) -> None:
            assert isinstance(outputs.logprobs, Tensor)
            tap.observe(Point(self.spec.num_layers, "logprob"), outputs.logprobs)

        with self._hooked(tap.observe):
            for part in parts:
                begin_micro_batch(case, tap, part, self.device)
                self.backend.forward([lay_out(part, self.device)], on_outputs, NOTHING_ELSE)
