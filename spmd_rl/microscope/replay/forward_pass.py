"""Forward passes to compare: their base, the trainer's pass, and that of `transformers`.

A pass runs every sequence of a case with its tokens given, and a tap observes every op. Another
engine or trainer is one more class with a `name` and a `run`. Its `run` calls `tap.begin_forward`,
and then `tap.observe` for the points that it can show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.taps.hooks import Observe, hook_model, hook_modules
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap, ValueTap
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.formats.coded_tensors import hold_codes
from spmd_rl.model.hf import fill, load_weights
from spmd_rl.model.hf_reference import attention_through, reference_model
from spmd_rl.model.layers.moe_module import mixtures
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.model.peft_folder import read_adapters
from spmd_rl.model.read import read_spec
from spmd_rl.model.scorer import Scorer
from spmd_rl.train import shared_prefix
from spmd_rl.train.microbatch import (
    MicroBatch,
    inverse_temperature,
    lay_out,
    num_micro_batches,
    split_sequences,
)
from spmd_rl.types.batch import Batch


class ForwardPass(ABC):
    """One side of a comparison.

    `name` is its name in the report. `model` has the weights under Hugging Face's module names, or
    is None. `dtype` is that of its activations, which lie on `device`. `rows_are_distinct` is set
    if no row stands for a prompt that several sequences share, and `is_recorded` if it was run
    elsewhere, so that nothing can be patched in. `split` is the size of attention's splits of keys,
    or 0. `facts` are counts of the last run. `problems` are sentences on what went wrong in it
    besides arithmetic.
    """

    name: str
    rows_are_distinct = True
    is_recorded = False
    model: Any = None
    split = 0

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.facts: dict[str, int] = {}
        self.problems: list[str] = []

    @abstractmethod
    def run(self, case: ReplayCase, tap: Tap) -> None: ...

    def values(self, case: ReplayCase, tap: ValueTap | None = None) -> ValueTap:
        """Return the values of a run in host memory, as the tap keeps them."""
        tap = tap or ValueTap(case.num_rows)
        self.run(case, tap)
        tap.move_to_host()
        return tap


def load_model(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightFormat = "full",
    exponents: Exponents | None = None,
    row_shards: int = 1,
    *,
    lora: LoraConfig = NO_LORA,
    holds: bool = False,
    part: ModelPart = WHOLE,
    experts: ProcessGroup | None = None,
) -> CausalLM:
    """Return the shared network with the folder's weights, rounded where `weights` says so. It sums
    as `row_shards` says (model/spec.py), and has the adapters in the folder of `lora`.

    With `exponents`, keys and values are rounded too. If it `holds` codes, it computes with them,
    as an engine does. It may be a `part` of the model, or one of the ranks that share `experts`.
    Raises: ConfigError if a folder does not serve.
    """
    with torch.device("meta"):
        spec = replace(read_spec(folder), row_shards=row_shards)
        model = CausalLM(spec, lora, exponents, part).to(dtype).requires_grad_(False)
        if holds:
            hold_codes(model, spec, weights)
        if experts is not None:
            for mixture in mixtures(model):
                mixture.split(experts)
    model = model.to_empty(device=device)
    load_weights(model, folder, weights)
    if lora.rank:
        fill(model, read_adapters(lora, spec))
    return model


class MicroBatchPass(ForwardPass):
    """A trainer's forward pass over packed micro-batches."""

    name = "trainer"

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype,
        max_tokens: int,
        share_prompts: bool,
    ) -> None:
        """Without `share_prompts`, each sequence is a micro-batch and computes its own prompt."""
        super().__init__(device, dtype)
        self.num_layers = num_layers
        self.max_tokens, self.share_prompts = max_tokens, share_prompts
        self.rows_are_distinct = device.type != "cpu" or not share_prompts

    @abstractmethod
    def hooked(self, observe: Observe) -> AbstractContextManager[None]:
        """While it is open, every op passes `observe`."""

    @abstractmethod
    def score(self, micro: MicroBatch) -> Tensor:
        """Return the log-probs of the response tokens."""

    def run(self, case: ReplayCase, tap: Tap) -> None:
        parts = micro_batches_of(case, self.max_tokens, self.share_prompts)
        self.facts = {"micro-batches": len(parts)}
        with self.hooked(tap.observe):
            for part in parts:
                begin_micro_batch(case, tap, part, self.device)
                logprobs = self.score(lay_out(part, self.device))
                tap.observe(Point(self.num_layers, "logprob"), logprobs)


class TrainerPass(MicroBatchPass):
    """The forward pass of a training step, without sharding.

    Gradients are enabled, so rows are padded and every op is the one that a backward pass could
    follow. No weight asks for a gradient, so nothing is kept for it. Recomputing layers changes
    nothing here; recomputing the head makes it another op.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_tokens: int = 16384,
        logit_rows: int = 2048,
        attention_split: int = 0,
        recompute: str = "none",
        share_prompts: bool = True,
    ) -> None:
        parameter = next(model.parameters())
        layers, device = model.spec.num_layers, parameter.device
        super().__init__(layers, device, parameter.dtype, max_tokens, share_prompts)
        self.model, self.split = model, attention_split
        self.scorer = Scorer(model, logit_rows, recompute == "all", attention_split)

    def hooked(self, observe: Observe) -> AbstractContextManager[None]:
        return hook_model(self.model, observe)

    @torch.enable_grad()
    def score(self, micro: MicroBatch) -> Tensor:
        return self.scorer(micro).logprobs


def micro_batches_of(case: ReplayCase, max_tokens: int, share_prompts: bool) -> list[Batch]:
    """Return the sequences as the micro-batches of a trainer.

    Without `share_prompts`, each sequence is one, and computes its own prompt.
    """
    batch = _batch(case)
    lengths = batch.lengths.tolist()
    count = num_micro_batches(lengths, max_tokens) if share_prompts else len(lengths)
    return [batch.select(part) for part in split_sequences(lengths, count)]


def begin_micro_batch(case: ReplayCase, tap: Tap, batch: Batch, device: torch.device) -> None:
    """Tell the tap which rows a trainer's micro-batch computes, and where: on a CPU, equal prompts
    are one segment.
    """
    is_shared = device.type == "cpu"
    layout = shared_prefix.pack_shared(batch) if is_shared else shared_prefix.pack_whole(batch)
    rows = np.concatenate([case.rows(number) for number in batch.index.tolist()])
    scored = rows[np.flatnonzero(batch.mask) - 1]
    is_computed = layout.position >= 0
    arrays = rows[is_computed], layout.position[is_computed], scored
    tap.begin_forward(*(torch.from_numpy(array).to(device) for array in arrays))


def _batch(case: ReplayCase) -> Batch:
    """Return the sequences as a batch to score; what only learning reads is zero."""
    zeros = np.zeros(case.num_rows, np.float32)
    return Batch(
        tokens=case.tokens.astype(np.int32),
        lengths=case.lengths.astype(np.int32),
        mask=_response_mask(case),
        weight=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        versions=np.full(case.num_rows, -1, np.int32),
        temperature=np.array([sequence.temperature for sequence in case.sequences], np.float32),
        index=np.arange(len(case.sequences), dtype=np.int32),
        denominator=1.0,
    )


def _response_mask(case: ReplayCase) -> NDArray[np.bool_]:
    """Return which rows are tokens of a response."""
    sizes = np.array(
        [(len(sequence.prompt), len(sequence.response)) for sequence in case.sequences]
    )
    return np.repeat(np.tile([False, True], len(sizes)), sizes.reshape(-1))


class ReferencePass(ForwardPass):
    """`transformers`: one sequence after the other, without padding and without a cache."""

    name = "transformers"

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(device, dtype)
        self.model, self.spec = reference_model(folder, dtype, device), read_spec(folder)

    @torch.no_grad()
    def run(self, case: ReplayCase, tap: Tap) -> None:
        def observe(point: Point, x: Tensor) -> Tensor:
            return tap.observe(point, x[0]).unsqueeze(0)

        def wrap(attention: Callable[..., Any]) -> Callable[..., Any]:
            return lambda module, *args, **rest: _observed_attention(
                attention, observe, module, *args, **rest
            )

        with hook_modules(self.model, self.spec, observe), attention_through(wrap):
            for number in range(len(case.sequences)):
                self._run_sequence(case, tap, number)

    def _run_sequence(self, case: ReplayCase, tap: Tap, number: int) -> None:
        sequence = case.sequences[number]
        arrays = case.rows(number), case.scored_positions(number), sequence.tokens
        rows, scored, tokens = (torch.from_numpy(array).to(self.device) for array in arrays)
        tap.begin_forward(rows, None, rows[scored])
        logits = tap.observe(Point(self.spec.num_layers, "logits"), self._logits(tokens, scored))
        logprobs = _score(logits, tokens[scored + 1], sequence.temperature)
        tap.observe(Point(self.spec.num_layers, "logprob"), logprobs)

    def _logits(self, tokens: Tensor, scored: Tensor) -> Tensor:
        out = self.model(input_ids=tokens[None], use_cache=False, logits_to_keep=scored)
        logits: Tensor = out.logits[0]
        return logits


def _score(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probs of `targets`. Shape: logits [R, V]; targets [R]; returns [R]."""
    scale = float(inverse_temperature(np.array([temperature], np.float32))[0])
    logprobs = (logits.float() * scale).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def _observed_attention(
    attention: Callable[..., Any], observe: Observe, module: Any, *args: Any, **rest: Any
) -> Any:
    """Call the attention function of `transformers` between our points.

    Heads lie before tokens in its input, and after them in its output.
    """
    layer = module.layer_idx
    q, k, v = (
        observe(Point(layer, op), x.transpose(1, 2)).transpose(1, 2)
        for op, x in zip("qkv", args[:3], strict=True)
    )
    out, weights = attention(module, q, k, v, *args[3:], **rest)
    return observe(Point(layer, "attention"), out), weights
