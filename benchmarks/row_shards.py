"""What sums in parts cost: a training step and decoding steps with each `row_shards`, on one GPU.

Ranks may share a model's matrices with the bits of one rank, because every role of the run sums
`o_proj` and `down_proj` in as many parts: 1, 2, 4 or 8 (docs/numerics.md, "Products that ranks
share"). Here one rank has all parts, so this is what a role pays that shares nothing itself.

A training step is that of train_step.py with half of its tokens. One learner takes it in turns, and
the first number of parts changes with each repetition. A decoding step is the native engine's, with
prompts of 128 tokens. Engines of all numbers of parts have the same weights, and take turns too.
Values are medians. One more engine records no graphs, and its samples with two parts are compared.

    python -m benchmarks.row_shards [--train 0.6B 4B] [--decode 8B] [--batches 1 64] [--save]

On a machine without a GPU, --train tiny --decode tiny tries the script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.coded_engine import DEVICE, FIRST_STEPS, LAST_STEPS, measure, model_of
from benchmarks.rank_learners import finish_anywhere, on_gpu, step_seconds
from benchmarks.record import compared, counted, measured
from benchmarks.table import Row
from benchmarks.training import batch, config, learner, release, spec_of
from spmd_rl.kernels import linear
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.linear import Linear
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ROW_SHARDS, WHOLE
from spmd_rl.model.parts.shared_products import share_products
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.native.config import GPU_PAGE_SIZE, NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.fsdp2.backend import Fsdp2

BARS = {2: 1.02}
STEP_TOKENS, TRIED_TOKENS = 32768, 2048
PROMPT, ANSWER = 128, 128
USUAL, FEWEST = ROW_SHARDS[:2]
FULL: WeightFormat = "full"


def sum_in_parts(model: CausalLM, spec: ModelSpec, row_shards: int) -> None:
    """Have a model that one rank has sum as `row_shards` says, from its next step on."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.product = linear
    share_products(model, replace(spec, row_shards=row_shards), WHOLE)


def in_turns(
    what: str, ways: Sequence[int], take: Callable[[int], float], repeats: int
) -> dict[int, float]:
    """Return the median of what `take` finds with each number of parts, after a turn to warm up."""
    found: dict[int, list[float]] = {one: [] for one in ways}
    for turn in range(1 + repeats):
        first = turn % len(ways)
        for one in (*ways[first:], *ways[:first]):
            value = take(one)
            print(f"{what}, {one} parts: {value:.4g}", flush=True)
            if turn:
                found[one].append(value)
    return {one: statistics.median(values) for one, values in found.items()}


def compare(what: str, found: dict[int, float], unit: str) -> Iterator[Row]:
    usual = found.pop(USUAL)
    for row_shards, value in found.items():
        yield compared(
            f"{what}, sums in {row_shards} parts",
            value,
            unit,
            peer="one part",
            peer_value=usual,
            at_most=BARS.get(row_shards),
        )


def training_rows(name: str, repeats: int) -> Iterator[Row]:
    one = learner(name, config(name))
    assert isinstance(one.backend, Fsdp2)
    model = one.backend.scorer.model
    given = batch(STEP_TOKENS if on_gpu() else TRIED_TOKENS, model.spec.vocab_size)
    what = f"Qwen3-{name}, training step of {given.num_tokens:,} tokens"
    scores = {}
    for row_shards in ROW_SHARDS:
        sum_in_parts(model, model.spec, row_shards)
        scores[row_shards] = one.score(given)

    def take(row_shards: int) -> float:
        sum_in_parts(model, model.spec, row_shards)
        return step_seconds(one, replace(given, rollout_logprobs=scores[row_shards]))

    yield from compare(what, in_turns(what, ROW_SHARDS, take, repeats), "s")
    for row_shards in ROW_SHARDS[1:]:
        unequal = int((scores[row_shards] != scores[USUAL]).sum())
        text = f"{what}, sums in {row_shards} parts: log-probs that are not those of one part"
        yield measured(text, unequal, "tokens", at_least=1)


def engine_of(whole: CausalLM, cfg: NativeEngineConfig, row_shards: int) -> NativeEngine:
    """Return an engine that sums in so many parts, and has the weights of `whole` in common."""
    with torch.device("meta"):
        model = CausalLM(replace(whole.spec, row_shards=row_shards)).requires_grad_(False)
    model.load_state_dict(whole.state_dict(), assign=True)
    engine = NativeEngine(model, cfg, DEVICE)
    engine.sink().commit(0)
    return engine


def decoding_rows(name: str, batches: Sequence[int], repeats: int) -> Iterator[Row]:
    most = max(batches)
    pages = -(-(PROMPT + ANSWER + 1) // GPU_PAGE_SIZE) * most + 2 * most
    cfg = NativeEngineConfig(
        dtype="bfloat16" if on_gpu() else "float32",
        max_batch=2 * most,  # the last rows would wait for others to end
        page_size=GPU_PAGE_SIZE,
        num_pages=pages,
    )
    whole = model_of(spec_of(name), cfg, FULL)
    whole.pack_projections()  # so that no engine moves them to memory of its own
    engines = {row_shards: engine_of(whole, cfg, row_shards) for row_shards in ROW_SHARDS}
    unrecorded = engine_of(whole, replace(cfg, cuda_graphs=False), FEWEST)
    print(f"engines of {name} are there", flush=True)
    answer = ANSWER if on_gpu() else FIRST_STEPS + LAST_STEPS + 8
    for size in batches:
        what = f"Qwen3-{name}, decoding step of {size}"
        drawn: dict[int, dict[int, bytes]] = {}

        def take(row_shards: int, size: int, drawn: dict[int, dict[int, bytes]]) -> float:
            step, drawn[row_shards] = measure(engines[row_shards], size, PROMPT, answer)
            return step

        found = in_turns(what, ROW_SHARDS, partial(take, size=size, drawn=drawn), repeats)
        yield from compare(what, found, "ms")
        _, expected = measure(unrecorded, size, PROMPT, answer)
        equal = [drawn[FEWEST][uid] == one for uid, one in expected.items()]
        yield counted(f"{what}, sums in {FEWEST} parts: samples as without graphs", equal)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", nargs="*", default=["0.6B", "4B"], help="shapes")
    parser.add_argument("--decode", nargs="*", default=["8B"], help="shapes")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.train:
        rows += training_rows(name, options.repeats)
        release()
    for name in options.decode:
        rows += decoding_rows(name, options.batches, options.repeats)
        release()
    return finish_anywhere(__file__, rows, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
