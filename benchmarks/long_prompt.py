"""A long prompt that arrives while others decode: how long decoding waits, and how long it takes.

Engines with the shapes of Qwen3-0.6B and random weights decode 64 sequences when a prompt of 60,000
tokens arrives. One runs as shipped. The other does not bound the work on prompts between two
decoding steps, so that all sequences wait for the whole prompt. The two take turns, after a turn
that records graphs. A gap is the time between two outputs of `step` with tokens of the 64
sequences, from before the arrival until the prompt has decoded some tokens too. The prompt's own
time is that from its submission to its first token. Samples of both engines are compared bit for
bit.

The time of each chunk on the GPU is printed beside the scheduler's estimate (prefill_cost.py).

    python -m benchmarks.long_prompt [--save] [MAX_PREFILL_MS]
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import random_weights, write_config
from benchmarks.table import Row
from spmd_rl.kernels import sample_and_score
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import NativeEngineConfig, Request, SamplingConfig
from spmd_rl.rollout.native.prefill_cost import PrefillCost, StepWork
from spmd_rl.rollout.native.replay import ReplayEngine, ReplayStep
from spmd_rl.types.samples import Sample

NAME, NUM_DECODING, SHORT, ANSWER = "0.6B", 64, 128, 1500
PROMPT, MAX_POSITIONS, PROMPT_ANSWER = 60_000, 65_536, 8
NUM_PAGES = 1200  # of 128 tokens: the prompt, and 64 sequences of up to eleven
SETTLED, TURNS = 20, 3  # steps before an arrival, and after the prompt; arrivals of each engine
GAP_BAR_MS, OWN_TIME_BAR = 50, 1.1
BOUNDED, WHOLE = "bounded", "whole"
DEVICE = torch.device("cuda")


class Chunk(NamedTuple):
    """A chunk of the prompt, with the seconds that its step took the GPU."""

    start: int
    length: int
    seconds: float


@dataclass(frozen=True)
class Arrival:
    """What was measured as the prompt arrived; `decode_s` is the median gap before."""

    gap_s: float
    own_s: float
    decode_s: float
    chunks: list[Chunk]
    sample: Sample


def shape(folder: Path) -> ModelSpec:
    return replace(write_config(NAME, folder), max_positions=MAX_POSITIONS)


@torch.no_grad()
def new_model(spec: ModelSpec) -> CausalLM:
    with torch.device("meta"):
        model = CausalLM(spec)
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).requires_grad_(False)
    for name, weight in random_weights(spec):
        model.get_parameter(name).copy_(weight)
    return model


def request(uid: int, num_tokens: int, max_tokens: int, vocab: int) -> Request:
    prompt = np.random.default_rng(uid).integers(0, vocab, num_tokens, dtype=np.int32)
    return Request(uid, 0, prompt, SamplingConfig(max_tokens=max_tokens, ignore_eos=True))


class Decoding:
    """An engine that decodes 64 sequences, and notes when the GPU begins each step."""

    def __init__(self, model: CausalLM, max_prefill_ms: float, **cfg: object) -> None:
        settings = {"max_batch": 2 * NUM_DECODING, "num_pages": NUM_PAGES} | cfg
        self.engine = ReplayEngine(
            model,
            NativeEngineConfig(max_prefill_ms=max_prefill_ms, **settings),
            DEVICE,
            sampler=sample_and_score,
            before_step=self._note,
        )
        self.engine.sink().commit(0)
        self.steps: list[tuple[ReplayStep, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Start the sequences, and go on until all of them decode."""
        for uid in range(NUM_DECODING):
            self.engine.submit(request(uid, SHORT, ANSWER, self.engine.spec.vocab_size))
        for _ in range(SETTLED):
            self.engine.step()

    def arrive(self, uid: int) -> Arrival:
        """Measure the arrival of prompt `uid`, which no engine has seen before."""
        prompt = request(uid, PROMPT, PROMPT_ANSWER, self.engine.spec.vocab_size)
        gc.collect()
        before = self._times(SETTLED)
        self.steps.clear()
        submitted = time.perf_counter()
        self.engine.submit(prompt)
        times, own_s, sample = before[-1:], 0.0, None
        while sample is None:
            output, now = self.engine.step(), time.perf_counter()
            if (output.uids < NUM_DECODING).any():
                times.append(now)
            if not own_s and (output.uids == uid).any():
                own_s = now - submitted
            sample = next((one for one in output.finished if one.prompt_uid == uid), None)
        times += self._times(SETTLED)
        gaps, settled = (
            [end - begin for begin, end in pairwise(found)] for found in (times, before)
        )
        return Arrival(max(gaps), own_s, statistics.median(settled), self._chunks(uid), sample)

    def _times(self, num_steps: int) -> list[float]:
        """Return when each of so many steps gave its tokens."""
        times = []
        for _ in range(num_steps):
            output = self.engine.step()
            if len(output.tokens) != NUM_DECODING:
                raise RuntimeError(f"a step decoded {len(output.tokens)} sequences")
            times.append(time.perf_counter())
        return times

    def _note(self, step: ReplayStep) -> None:
        self.steps.append((step, mark()))

    def _chunks(self, uid: int) -> list[Chunk]:
        found = []
        for (step, begin), (_, end) in pairwise(self.steps):
            if step.uids.tolist() == [uid]:
                seconds = begin.elapsed_time(end) / 1e3
                found.append(Chunk(int(step.starts[0]), int(step.lengths[0]), seconds))
        return found


def mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def unequal(one: Sample, other: Sample) -> int:
    """Return the tokens of two samples that differ, or whose log-probs differ in any bit."""
    same = one.tokens == other.tokens
    same &= one.logprobs.view(np.int32) == other.logprobs.view(np.int32)
    return int((~same).sum())


def print_chunks(arrival: Arrival, cost: PrefillCost) -> None:
    for start, length, seconds in arrival.chunks:
        estimate = cost.add(StepWork(), start, length).seconds
        print(
            f"{length:5} tokens behind {start:5}: {1e3 * seconds:6.1f} ms,"
            f" estimate {1e3 * estimate:6.1f} ms, {estimate / seconds:.2f}x"
        )


def measure(max_prefill_ms: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="shape-") as folder:
        spec = shape(Path(folder))
    model = new_model(spec)
    engines = {BOUNDED: Decoding(model, max_prefill_ms), WHOLE: Decoding(model, 0.0)}
    for one in engines.values():
        one.begin()
    found: dict[str, list[Arrival]] = {kind: [] for kind in engines}
    for turn in range(1 + TURNS):
        for kind, one in engines.items():
            arrival = one.arrive(NUM_DECODING + turn)
            print(
                f"{kind}: gap {1e3 * arrival.gap_s:.1f} ms, own time {1e3 * arrival.own_s:.1f} ms, "
                f"decoding {1e3 * arrival.decode_s:.2f} ms, {len(arrival.chunks)} chunks",
                flush=True,
            )
            found[kind] += [arrival] if turn else []
    num_processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for arrivals in found.values():
        print_chunks(arrivals[-1], PrefillCost.of_model(spec, num_processors))
    yield from rows_of(found[BOUNDED], found[WHOLE])


def rows_of(bounded: list[Arrival], whole: list[Arrival]) -> Iterator[Row]:
    what = f"Qwen3-{NAME}, {NUM_DECODING} sequences decode, a prompt of {PROMPT:,} tokens arrives"
    gap, peer_gap = (1e3 * max(one.gap_s for one in found) for found in (bounded, whole))
    own, peer_own = (
        1e3 * statistics.median(one.own_s for one in found) for found in (bounded, whole)
    )
    decode = 1e3 * statistics.median(one.decode_s for one in bounded)
    num_chunks = len(bounded[0].chunks)
    differ = sum(unequal(a.sample, b.sample) for a, b in zip(bounded, whole, strict=True))
    yield measured(f"{what}: longest gap between decoding steps", gap, "ms", at_most=GAP_BAR_MS)
    yield measured(f"{what}: the same without a bound", peer_gap, "ms")
    yield compared(
        f"{what}: time to its first token in {num_chunks} chunks",
        own,
        "ms",
        peer="without a bound",
        peer_value=peer_own,
        at_most=OWN_TIME_BAR,
    )
    yield measured(f"{what}: a decoding step before", decode, "ms")
    yield measured(f"{what}: unequal tokens of its answers", differ, "tokens", at_most=0)


def main(words: list[str]) -> int:
    given = [float(word) for word in words if not word.startswith("--")]
    rows = list(measure(given[0] if given else NativeEngineConfig().max_prefill_ms))
    packages = ("torch", "triton", "flash-attn-4")
    return finish(__file__, packages, rows, save="--save" in words, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
