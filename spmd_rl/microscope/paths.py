"""The ways to run a forward pass: as the engine does, as the trainer does, as `transformers` does.

A path runs every sequence of a case with its tokens given, and lets a tap see every op. Another engine or trainer is
one more class with a `name` and a `run` that calls `tap.begin` and then `tap.see` for the points it can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention, token_logprobs
from spmd_rl.microscope.case import Case
from spmd_rl.microscope.points import Point
from spmd_rl.microscope.taps import Tap
from spmd_rl.microscope.watch import watch, watch_modules
from spmd_rl.model.hf import load_weights
from spmd_rl.model.network import Attend, CausalLM
from spmd_rl.model.reference import attention_through, reference_model
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train import prefixes
from spmd_rl.train.fsdp2 import Scorer
from spmd_rl.train.microbatch import inverse_temperature, lay_out, num_needed, split
from spmd_rl.types import Batch


class Path(Protocol):
    """`name` is what the report calls it, `model` has the weights under Hugging Face's module names.

    `rows_are_distinct`: no row stands for a prompt that several sequences share.
    """

    name: str
    rows_are_distinct: bool
    model: Any

    def run(self, case: Case, tap: Tap) -> None: ...


def load_model(folder: str | Folder, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The shared network with the folder's weights. Raises: ConfigError when the folder does not serve."""
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(folder))
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    load_weights(model, folder)
    return model


@dataclass(frozen=True)
class Step:
    """Some new tokens of some sequences over a paged cache.

    Shape: numbers, starts, lengths [B]; pages [B, P]; rows, positions, slots [T].
    """

    cache: KvCache
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pages: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]

    def attention(self, num_heads: int) -> PagedAttention:
        """As the engine makes it: decoding steps that it records as graphs have their state on the GPU."""
        if self.cache.flash and (self.lengths == 1).all():
            device = self.cache.data.device
            used = np.arange(self.pages.shape[1]) * self.cache.page_size <= self.starts[:, None]
            pages = torch.from_numpy(np.where(used, self.pages, self.pages[:, :1]).astype(np.int32)).to(device)
            num_keys = torch.from_numpy((self.starts + 1).astype(np.int32)).to(device)
            slots = torch.from_numpy(self.slots).to(device)
            return PagedAttention.decode(self.cache, pages=pages, num_keys=num_keys, slots=slots)
        return PagedAttention.chunks(
            self.cache,
            page_table=self.pages,
            starts=self.starts,
            lengths=self.lengths,
            slots=self.slots,
            num_heads=num_heads,
        )


class EnginePath:
    """The native engine's forward passes: prompts in chunks through a paged cache, then one token of each sequence.

    Pages are handed out in a scattered order. `wrap` may put another attention in the place of a step's own.
    """

    name = "engine"
    rows_are_distinct = True

    def __init__(self, model: CausalLM, *, page_size: int = 16, max_step_tokens: int = 2048) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.page_size = page_size
        self.max_step_tokens = max_step_tokens
        self.wrap: Callable[[Step, Attend], Attend] = lambda step, attend: attend
        if self.device.type == "cuda":
            model.lay_out_projections()
            model.join_projections()

    @torch.inference_mode()
    def run(self, case: Case, tap: Tap) -> None:
        table, num_pages = _scattered_pages(case, self.page_size)
        cache = self._cache(num_pages)
        with watch(self.model, tap.see):
            for parts in _steps(case, self.max_step_tokens):
                self._step(case, tap, _laid_out(case, parts, table, cache))

    def _step(self, case: Case, tap: Tap, step: Step) -> None:
        sequence_of = np.repeat(step.numbers, step.lengths)
        prompts = np.array([len(one.prompt) for one in case.sequences])
        tokens = np.concatenate([one.tokens for one in case.sequences])
        ready = np.flatnonzero(step.positions >= prompts[sequence_of] - 1)
        scored = step.rows[ready]
        tap.begin(self._tensor(step.rows), self._tensor(np.arange(len(step.rows))), self._tensor(scored))
        attend = self.wrap(step, step.attention(self.model.spec.num_heads))
        last = self._tensor(ready) if len(ready) else None
        logits = self.model(self._tensor(tokens[step.rows]), self._tensor(step.positions), attend, last)
        if last is not None:
            temperatures = np.array([case.sequences[n].temperature for n in sequence_of[ready]], np.float32)
            targets, scale = self._tensor(tokens[scored + 1]), self._tensor(inverse_temperature(temperatures))
            _score(tap, self.model.spec.num_layers, token_logprobs(logits, targets, scale)[0])

    def _cache(self, num_pages: int) -> KvCache:
        spec = self.model.spec
        return KvCache(
            num_layers=spec.num_layers,
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=next(self.model.parameters()).dtype,
            device=self.device,
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _laid_out(case: Case, parts: list[tuple[int, int, int]], table: NDArray[np.int64], cache: KvCache) -> Step:
    """`parts`: sequence, first position and number of tokens of each; `table` [S, P] has every sequence's pages."""
    numbers, starts, lengths = (np.array(column) for column in zip(*parts, strict=True))
    rows = np.concatenate([case.offsets[n] + start + np.arange(count) for n, start, count in parts])
    positions = rows - np.repeat(case.offsets[numbers], lengths)
    page, offset = np.divmod(positions, cache.page_size)
    return Step(
        cache=cache,
        numbers=numbers,
        starts=starts,
        lengths=lengths,
        pages=table[numbers, : int(page.max()) + 1],
        rows=rows,
        positions=positions,
        slots=table[np.repeat(numbers, lengths), page] * cache.page_size + offset,
    )


def _scattered_pages(case: Case, page_size: int) -> tuple[NDArray[np.int64], int]:
    """A page table [S, P], and how many pages there are."""
    counts = -(-case.lengths // page_size)
    order = np.random.default_rng(0).permutation(int(counts.sum()))
    table = np.zeros((len(counts), int(counts.max())), np.int64)
    table[np.arange(counts.max()) < counts[:, None]] = order
    return table, len(order)


def _steps(case: Case, max_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """All prompts, cut where a step is full; then a token of every sequence a step, but for each one's last."""
    step: list[tuple[int, int, int]] = []
    room = max_tokens
    for number, one in enumerate(case.sequences):
        done = 0
        while done < len(one.prompt):
            count = min(room, len(one.prompt) - done)
            step.append((number, done, count))
            done, room = done + count, room - count
            if not room:
                yield step
                step, room = [], max_tokens
    if step:
        yield step
    for late in range(max(len(one.response) for one in case.sequences) - 1):
        running = [n for n, one in enumerate(case.sequences) if late < len(one.response) - 1]
        for first in range(0, len(running), max_tokens):
            chosen = running[first : first + max_tokens]
            yield [(n, len(case.sequences[n].prompt) + late, 1) for n in chosen]


class TrainerPath:
    """The trainer's forward pass over packed micro-batches, its weights whole where FSDP would gather them."""

    name = "trainer"
    rows_are_distinct = False

    def __init__(self, model: CausalLM, *, max_tokens: int = 16384, logit_rows: int = 2048) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.scorer = Scorer(model, logit_rows, recomputes=False)
        self.max_tokens = max_tokens

    @torch.no_grad()
    def run(self, case: Case, tap: Tap) -> None:
        batch = _batch(case)
        lengths = batch.lengths.tolist()
        with watch(self.model, tap.see):
            for part in split(lengths, num_needed(lengths, self.max_tokens)):
                self._micro_batch(case, tap, batch.take(part))

    def _micro_batch(self, case: Case, tap: Tap, batch: Batch) -> None:
        pieces = prefixes.shared(batch) if self.device.type == "cpu" else prefixes.whole(batch)
        rows = np.concatenate([case.offsets[n] + np.arange(case.lengths[n]) for n in batch.index])
        scored = torch.from_numpy(rows[np.flatnonzero(batch.mask) - 1]).to(self.device)
        tap.begin(torch.from_numpy(rows).to(self.device), torch.from_numpy(pieces.place).to(self.device), scored)
        logprobs, _ = self.scorer(lay_out(batch, self.device))
        _score(tap, self.model.spec.num_layers, logprobs)


def _batch(case: Case) -> Batch:
    """The sequences as a batch to score; what only learning reads is zero."""
    tokens = np.concatenate([one.tokens for one in case.sequences]).astype(np.int32)
    sizes = np.array([(len(one.prompt), len(one.response)) for one in case.sequences])
    zeros = np.zeros(len(tokens), np.float32)
    return Batch(
        tokens=tokens,
        lengths=case.lengths.astype(np.int32),
        mask=np.repeat(np.tile([False, True], len(sizes)), sizes.reshape(-1)),
        weight=zeros,
        advantages=zeros,
        roll_logprobs=zeros,
        versions=np.full(len(tokens), -1, np.int32),
        temperature=np.array([one.temperature for one in case.sequences], np.float32),
        index=np.arange(len(sizes), dtype=np.int32),
        denominator=1.0,
    )


class ReferencePath:
    """`transformers`: one sequence after the other, without padding and without a cache."""

    name = "transformers"
    rows_are_distinct = True

    def __init__(self, folder: str | Folder, dtype: torch.dtype, device: torch.device) -> None:
        self.model = reference_model(folder, dtype, device)
        self.device = device
        self.num_layers = len(self.model.model.layers)

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
        one, places = case.sequences[number], torch.arange(int(case.lengths[number]), device=self.device)
        scored = torch.from_numpy(case.scored(number)).to(self.device)
        offset = int(case.offsets[number])
        tap.begin(offset + places, places, offset + scored)
        tokens = torch.from_numpy(one.tokens).to(self.device)
        out = self.model(input_ids=tokens[None], use_cache=False, logits_to_keep=scored)
        logits = tap.see(Point(self.num_layers, "logits"), out.logits[0])
        scale = float(inverse_temperature(np.array([one.temperature], np.float32))[0])
        logprobs = (logits.float() * scale).log_softmax(-1).gather(1, tokens[scored + 1][:, None])
        _score(tap, self.num_layers, logprobs[:, 0])


def _attended(plain: Callable[..., Any], see: Any, module: Any, *args: Any, **rest: Any) -> Any:
    """Their attention function between our points: heads lie before tokens in its input, after them in its output."""
    layer = module.layer_idx
    q, k, v = (see(Point(layer, op), x.transpose(1, 2)).transpose(1, 2) for op, x in zip("qkv", args[:3], strict=True))
    out, weights = plain(module, q, k, v, *args[3:], **rest)
    return see(Point(layer, "attention"), out), weights


def _score(tap: Tap, num_layers: int, logprobs: Tensor) -> None:
    tap.see(Point(num_layers, "logprob"), logprobs)
