"""Ways to run a forward pass: what every one is, the trainer's, and that of `transformers`.

A path runs every sequence of a case with its tokens given, and lets a tap see every op. Another
engine or trainer is one more class with a `name` and a `run` that calls `tap.begin` and then
`tap.see` for the points it can show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.taps.hooks import watch, watch_modules
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.hf import load_weights
from spmd_rl.model.hf_reference import attention_through, reference_model
from spmd_rl.model.network import CausalLM
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train import shared_prefix
from spmd_rl.train.microbatch import (
    inverse_temperature,
    lay_out,
    num_micro_batches,
    split_sequences,
)
from spmd_rl.types.batch import Batch


class Path(Protocol):
    """`name` is what the report calls it, `model` has the weights under Hugging Face's module
    names.

    `rows_are_distinct`: no row stands for a prompt that several sequences share. `split`: of
    attention's keys, or 0. `facts`: counts of the last run, which say what it went through;
    `troubles`: what went wrong in it besides arithmetic, as sentences.
    """

    name: str
    rows_are_distinct: bool
    model: Any
    split: int
    facts: dict[str, int]
    troubles: list[str]

    def run(self, case: Case, tap: Tap) -> None: ...


def load_model(folder: str | Folder, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The shared network with the folder's weights. Raises: ConfigError when the folder does not
    serve.
    """
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(folder))
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    load_weights(model, folder)
    return model


class TrainerPass:
    """The forward pass of a training step over packed micro-batches, its weights whole where FSDP
    would gather them.

    Gradients are enabled, so that rows are padded and every op is the one that a backward pass
    could follow; since no weight wants one, nothing is kept for it. What a run recomputes of a
    layer changes nothing here; of the head it is another op.
    """

    name = "trainer"

    def __init__(
        self,
        model: CausalLM,
        *,
        max_tokens: int = 16384,
        logit_rows: int = 2048,
        attention_split: int = 0,
        recompute: str = "none",
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.rows_are_distinct = self.device.type != "cpu"
        self.split = attention_split
        self.facts: dict[str, int] = {}
        self.troubles: list[str] = []
        self.scorer = Scorer(model, logit_rows, recompute == "all", attention_split)
        self.max_tokens = max_tokens

    @torch.enable_grad()
    def run(self, case: Case, tap: Tap) -> None:
        batch = _batch(case)
        lengths = batch.lengths.tolist()
        parts = split_sequences(lengths, num_micro_batches(lengths, self.max_tokens))
        self.facts = {"micro-batches": len(parts)}
        with watch(self.model, tap.see):
            for part in parts:
                self._micro_batch(case, tap, batch.select(part))

    def _micro_batch(self, case: Case, tap: Tap, batch: Batch) -> None:
        on_cpu = self.device.type == "cpu"
        layout = (shared_prefix.pack_shared if on_cpu else shared_prefix.pack_whole)(batch)
        rows = np.concatenate([case.offsets[n] + np.arange(case.lengths[n]) for n in batch.index])
        scored = torch.from_numpy(rows[np.flatnonzero(batch.mask) - 1]).to(self.device)
        laid = layout.position >= 0
        given, places = (
            torch.from_numpy(array[laid]).to(self.device) for array in (rows, layout.position)
        )
        tap.begin(given, places, scored)
        logprobs, _ = self.scorer(lay_out(batch, self.device))
        tap.see(Point(self.model.spec.num_layers, "logprob"), logprobs)


def _batch(case: Case) -> Batch:
    """The sequences as a batch to score; what only learning reads is zero."""
    sizes = np.array([(len(one.prompt), len(one.response)) for one in case.sequences])
    zeros = np.zeros(case.num_rows, np.float32)
    return Batch(
        tokens=case.tokens.astype(np.int32),
        lengths=case.lengths.astype(np.int32),
        mask=np.repeat(np.tile([False, True], len(sizes)), sizes.reshape(-1)),
        weight=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        versions=np.full(case.num_rows, -1, np.int32),
        temperature=np.array([one.temperature for one in case.sequences], np.float32),
        index=np.arange(len(sizes), dtype=np.int32),
        denominator=1.0,
    )


class ReferencePass:
    """`transformers`: one sequence after the other, without padding and without a cache."""

    name = "transformers"
    split = 0
    rows_are_distinct = True

    def __init__(self, folder: str | Folder, dtype: torch.dtype, device: torch.device) -> None:
        self.model = reference_model(folder, dtype, device)
        self.device = device
        self.num_layers = len(self.model.model.layers)
        self.facts: dict[str, int] = {}
        self.troubles: list[str] = []

    @torch.no_grad()
    def run(self, case: Case, tap: Tap) -> None:
        def see(point: Point, x: Tensor) -> Tensor:
            return tap.see(point, x[0]).unsqueeze(0)

        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            return lambda module, *args, **rest: _attended(plain, see, module, *args, **rest)

        with watch_modules(self.model, see), attention_through(wrap):
            for number in range(len(case.sequences)):
                self._sequence(case, tap, number)

    def _sequence(self, case: Case, tap: Tap, number: int) -> None:
        one, places = (
            case.sequences[number],
            torch.arange(int(case.lengths[number]), device=self.device),
        )
        scored = torch.from_numpy(case.scored(number)).to(self.device)
        offset = int(case.offsets[number])
        tap.begin(offset + places, None, offset + scored)
        tokens = torch.from_numpy(one.tokens).to(self.device)
        out = self.model(input_ids=tokens[None], use_cache=False, logits_to_keep=scored)
        logits = tap.see(Point(self.num_layers, "logits"), out.logits[0])
        scale = float(inverse_temperature(np.array([one.temperature], np.float32))[0])
        logprobs = (logits.float() * scale).log_softmax(-1).gather(1, tokens[scored + 1][:, None])
        tap.see(Point(self.num_layers, "logprob"), logprobs[:, 0])


def _attended(plain: Callable[..., Any], see: Any, module: Any, *args: Any, **rest: Any) -> Any:
    """Their attention function between our points: heads lie before tokens in its input, after them
    in its output.
    """
    layer = module.layer_idx
    q, k, v = (
        see(Point(layer, op), x.transpose(1, 2)).transpose(1, 2)
        for op, x in zip("qkv", args[:3], strict=True)
    )
    out, weights = plain(module, q, k, v, *args[3:], **rest)
    return see(Point(layer, "attention"), out), weights
