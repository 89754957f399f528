"""Top-k, top-p and min-p with and without their replay, at a Qwen3 shape on one GPU.

A learner and an engine hold the same random weights. For each filter the last norm is scaled until
the median kept set has some 30 tokens; top-k takes the scale of top-p. Then waves of 4,096 requests
(16 prompt and 64 response tokens, 512 at once) run to their end, with and without replay in turns.
Longer answers of random weights end in repeating themselves, with sets of one token. The learner
scores all tokens of the waves with replay, and counts those whose log-prob has other bits than the
recorded one. Its training step, on some 65,000 of these tokens in packs of 16,384, also takes turns
with one that has no sets. The learning rate is 0, so that the weights stay. A small wave at the
first scale has nearly flat logits: its sets are most of the vocabulary.

Values are medians of the host's clock, with the GPU drained before and after. A step is a rollout
and the training on its tokens.

    python -m benchmarks.filter_replay [--shape 0.6B] [--waves 3] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from benchmarks.training import config, learner
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import NativeEngineConfig, Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.learner import Learner
from spmd_rl.train.on_policy import COMPARED, MISMATCHED
from spmd_rl.types.batch import Batch
from spmd_rl.types.kept_sets import decode_sets
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Group, Sample

PACKAGES = ("torch", "triton", "flash-attn-4")
PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS, MAX_BATCH = 16, 64, 4096, 512
PAGES_PER_REQUEST = -(-(PROMPT_TOKENS + NEW_TOKENS) // 128)
TRAIN_SEQUENCES, TRAIN_REPEATS, WARMUPS = 819, 7, 2
SCORED_SEQUENCES = 1638  # in a call
FLAT_REQUESTS, FLAT_TOKENS = 32, 64
TRIAL_REQUESTS, TRIALS = 64, 8
LEAST_MEDIAN, TARGET, MOST_MEDIAN = 10, 30, 100
MOST_SCALE = 64.0
MIN_TOKENS, BAR = 2_000_000, 1.02
NORM = "model.norm.weight"
FILTERS = {
    "top-p 0.95": SamplingConfig(top_p=0.95, ignore_eos=True),
    "top-k 50": SamplingConfig(top_k=50, ignore_eos=True),
    "min-p 0.05": SamplingConfig(min_p=0.05, ignore_eos=True),
}


@dataclass
class Pair:
    """A learner and an engine with the same weights; `scale` is that of the last norm."""

    learner: Learner
    engine: NativeEngine
    scale: float = 1.0

    @torch.no_grad()
    def push(self) -> None:
        sink = self.engine.sink()
        sink.open()
        for name, parameter in self.engine.model.named_parameters():
            parameter.copy_(self.learner.backend.gather(name))
        sink.commit(0)

    @torch.no_grad()
    def set_scale(self, scale: float) -> None:
        """Set the last norm's weight, which scales all logits."""
        rounded = torch.tensor(scale, dtype=torch.bfloat16).item()
        self.learner.backend.local[NORM].fill_(rounded)
        dict(self.engine.model.named_parameters())[NORM].fill_(rounded)
        self.engine.sink().commit(0)
        self.scale = rounded

    def rollout(
        self, sampling: SamplingConfig, seed: int, count: int = NUM_REQUESTS
    ) -> tuple[float, list[Group]]:
        """Return seconds, and the samples of `count` requests."""
        rng = np.random.default_rng(seed)
        vocab = self.engine.spec.vocab_size
        prompts = [
            Prompt(uid, rng.integers(0, vocab, PROMPT_TOKENS, np.int32)) for uid in range(count)
        ]
        samples: list[Sample] = []
        synchronize()
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.submit(Request(prompt.uid, 0, prompt.tokens, sampling, seed=seed))
        while self.engine.has_work:
            samples += self.engine.step().finished
        synchronize()
        seconds = time.perf_counter() - start
        by_uid = {sample.prompt_uid: sample for sample in samples}
        return seconds, [Group(prompt, [by_uid[prompt.uid]]) for prompt in prompts]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def new_pair(shape: str) -> Pair:
    one = learner(shape, config(shape))
    spec, device = one.backend.scorer.model.spec, one.backend.device
    with torch.device("meta"):
        model = CausalLM(spec)
    dtype = one.backend._dtype
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    cfg = NativeEngineConfig(
        max_batch=MAX_BATCH,
        num_pages=MAX_BATCH * (PAGES_PER_REQUEST + 1),
        page_size=128,
        dtype=str(dtype).removeprefix("torch."),
    )
    pair = Pair(one, NativeEngine(model, cfg, device))
    pair.push()
    return pair


def set_sizes(groups: Sequence[Group]) -> NDArray[np.int64]:
    kept = b"".join(group.samples[0].kept for group in groups)
    return decode_sets(np.frombuffer(kept, np.uint8))[0]


def find_scale(pair: Pair, sampling: SamplingConfig) -> None:
    """Scale the logits until a small rollout's median set is near the target."""
    low, high = 1.0, MOST_SCALE
    for _ in range(TRIALS):
        pair.set_scale((low * high) ** 0.5)
        median = float(np.median(set_sizes(pair.rollout(sampling, 0, TRIAL_REQUESTS)[1])))
        print(f"scale {pair.scale:.2f}: median set {median:.0f}", flush=True)
        if TARGET / 1.5 <= median <= TARGET * 1.5:
            return
        low, high = (pair.scale, high) if median > TARGET else (low, pair.scale)


def as_batch(groups: Sequence[Group]) -> Batch:
    rng = np.random.default_rng(0)
    return pack(list(groups), [rng.standard_normal(1) for _ in groups])


def unequal_tokens(one: Learner, groups: Sequence[Group]) -> int:
    """Count tokens whose log-prob has other bits in the learner than recorded."""
    count = 0
    for start in range(0, len(groups), SCORED_SEQUENCES):
        batch = as_batch(groups[start : start + SCORED_SEQUENCES])
        scores = one.score(batch)[batch.mask].view(np.int32)
        count += int((scores != batch.rollout_logprobs[batch.mask].view(np.int32)).sum())
    return count


def in_turns(
    names: Sequence[str], repeats: int, run: Callable[[str, int], float], warmups: int
) -> dict[str, float]:
    """Return the median seconds of each kind of run; the first one changes with each repetition."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(warmups + repeats):
        for name in names if repeat % 2 else reversed(names):
            taken = run(name, repeat)
            if repeat >= warmups:
                seconds[name].append(taken)
            print(f"{name}: {taken:.4f} s", flush=True)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


WITH, WITHOUT = "with replay", "without"


def train_seconds(pair: Pair, groups: Sequence[Group]) -> tuple[dict[str, float], float, float]:
    """Return seconds of a training step of each kind, and mismatched and compared tokens."""
    one, given = pair.learner, as_batch(groups[:TRAIN_SEQUENCES])
    batches = {WITH: given, WITHOUT: replace(given, kept=[])}
    metrics: dict[str, float] = {}

    def step(name: str, repeat: int) -> float:
        one.state.version = 0
        synchronize()
        start = time.perf_counter()
        found = one.train_step(batches[name], grpo_loss, lr=0.0)
        synchronize()
        if name == WITH:
            metrics.update(found)
        return time.perf_counter() - start

    seconds = in_turns((WITH, WITHOUT), TRAIN_REPEATS, step, WARMUPS)
    one.state.version = 0
    return seconds, metrics[MISMATCHED], metrics[COMPARED]


def measure(pair: Pair, name: str, waves: int) -> Iterator[Row]:
    sampling = replace(FILTERS[name], max_tokens=NEW_TOKENS)
    if not sampling.top_k:
        find_scale(pair, sampling)
    kinds = {WITH: sampling, WITHOUT: replace(sampling, replay_filters=False)}
    for one in kinds.values():  # records the graphs
        pair.rollout(replace(one, max_tokens=4), 1)
    groups: list[Group] = []

    def wave(kind: str, repeat: int) -> float:
        seconds, made = pair.rollout(kinds[kind], 2 + repeat)
        if kind == WITH:
            groups.extend(made)
        return seconds

    rollout = in_turns((WITH, WITHOUT), waves, wave, 0)
    pair.engine.sleep()
    torch.cuda.empty_cache()
    sizes, num_tokens = set_sizes(groups), len(groups) * NEW_TOKENS
    num_bytes = sum(len(group.samples[0].kept) for group in groups)
    unequal = unequal_tokens(pair.learner, groups)
    yield measured(f"{name}: unequal of {num_tokens} tokens", unequal, "tokens", at_most=0)
    yield measured(f"{name}: median kept set", float(np.median(sizes)), "tokens")
    yield measured(f"{name}: mean kept set", float(sizes.mean()), "tokens")
    yield measured(f"{name}: encoded sets", num_bytes / num_tokens, "bytes/token")
    train, mismatched, num_compared = train_seconds(pair, groups)
    yield measured(
        f"{name}: mismatched of {num_compared:.0f} trained tokens", mismatched, "tokens", at_most=0
    )
    for what, seconds in (("rollout of a wave", rollout), ("training step", train)):
        yield compared(
            f"{name}: {what} {WITH}", seconds[WITH], "s", peer=WITHOUT, peer_value=seconds[WITHOUT]
        )
    share = NUM_REQUESTS / TRAIN_SEQUENCES  # training steps for a wave
    ours, plain = (rollout[kind] + share * train[kind] for kind in (WITH, WITHOUT))
    yield compared(f"{name}: step {WITH}", ours, "s", peer=WITHOUT, peer_value=plain, at_most=BAR)
    pair.engine.wake()


def measure_flat(pair: Pair) -> Iterator[Row]:
    """Yield rows of nearly flat logits, whose sets are most of the vocabulary."""
    pair.set_scale(1.0)
    sampling = replace(FILTERS["top-p 0.95"], max_tokens=FLAT_TOKENS)
    _, groups = pair.rollout(sampling, 1, FLAT_REQUESTS)
    num_tokens = FLAT_REQUESTS * FLAT_TOKENS
    name = "flat logits, top-p 0.95"
    unequal = unequal_tokens(pair.learner, groups)
    yield measured(f"{name}: unequal of {num_tokens} tokens", unequal, "tokens", at_most=0)
    yield measured(f"{name}: median kept set", float(np.median(set_sizes(groups))), "tokens")
    num_bytes = sum(len(group.samples[0].kept) for group in groups)
    yield measured(f"{name}: encoded sets", num_bytes / num_tokens, "bytes/token")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("0.6B", "4B"), default="0.6B")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    pair = new_pair(options.shape)
    rows = list(measure_flat(pair))
    for name in FILTERS:
        rows += measure(pair, name, options.waves)
    medians = [row.value for row in rows if "median kept set" in row.what][1:]
    in_range = [LEAST_MEDIAN <= median <= MOST_MEDIAN for median in medians]
    rows.append(counted(f"median kept sets of {LEAST_MEDIAN} to {MOST_MEDIAN} tokens", in_range))
    total = len(FILTERS) * options.waves * NUM_REQUESTS * NEW_TOKENS
    rows.append(measured("tokens together", total, "tokens", at_least=MIN_TOKENS))
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
