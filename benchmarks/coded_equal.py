"""Tokens of an engine with weights and cache in few bits, whose log-probs a trainer's pass repeats.

The engine holds codes. The other side is the forward pass of a training step over packed sequences,
with the numbers that the codes stand for, in bfloat16. Prompts have 8 to 200 tokens and answers 64
to 512, so that sequences come and go. At last one code of the engine is flipped, which must show.

    python -m benchmarks.coded_equal [0.6B 4B 8B 30B-A3B] [--formats e4m3 int4] [--sequences 1024]
        [--save]
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.coded_engine import DEVICE, engine_of, model_of
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import QWEN3, write_config
from benchmarks.table import Row
from spmd_rl.algo.packing import pack
from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import GPU_PAGE_SIZE, NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.microbatch import lay_out, num_micro_batches, split_sequences
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt

FORMATS = {
    "e4m3": NativeEngineConfig(weights="e4m3"),
    "int4": NativeEngineConfig(weights="int4"),
    "a cache in e4m3": NativeEngineConfig(cache="e4m3"),
    "e4m3 with its cache": NativeEngineConfig(weights="e4m3", cache="e4m3"),
    "int4 with a cache in e4m3": NativeEngineConfig(weights="int4", cache="e4m3"),
}
PROMPTS, ANSWERS, BATCH = (8, 200), (64, 512), 256
PACK_TOKENS, LOGIT_ROWS = 16384, 2048
FEW = 64  # sequences after a code was flipped


def drawn(engine: NativeEngine, count: int) -> list[Group]:
    rng = np.random.default_rng(count)
    prompts = {}
    for uid in range(count):
        tokens = rng.integers(0, 1000, rng.integers(*PROMPTS)).astype(np.int32)
        sampling = SamplingConfig(max_tokens=int(rng.integers(*ANSWERS)), ignore_eos=True)
        engine.submit(Request(uid, 0, tokens, sampling, seed=1))
        prompts[uid] = Prompt(uid, tokens)
    found = []
    while engine.has_work:
        found += [Group(prompts[one.prompt_uid], [one]) for one in engine.step().finished]
    return found


@torch.enable_grad()
def compared(scorer: Scorer, groups: list[Group]) -> tuple[int, int]:
    """Return how many tokens were drawn, and how many have other log-probs in a training pass."""
    batch = pack(groups, [np.zeros(1) for _ in groups])
    lengths = batch.lengths.tolist()
    num_tokens = num_unequal = 0
    for part in split_sequences(lengths, num_micro_batches(lengths, PACK_TOKENS)):
        micro = lay_out(batch.select(part), DEVICE)
        own = scorer(micro).logprobs.view(torch.int32)
        num_tokens += len(own)
        num_unequal += int((own != micro.rollout_logprobs.view(torch.int32)).sum())
    return num_tokens, num_unequal


def rows_of(name: str, kind: str, spec: ModelSpec, count: int) -> Iterator[Row]:
    pages = BATCH * -(-(PROMPTS[1] + ANSWERS[1]) // GPU_PAGE_SIZE)
    cfg = replace(FORMATS[kind], dtype="bfloat16", max_batch=BATCH, num_pages=pages)
    engine = engine_of(spec, cfg, cfg.weights)
    scorer = Scorer(model_of(spec, replace(cfg, weights="full"), cfg.weights), LOGIT_ROWS, False)
    what = f"Qwen3-{name}, {kind}"
    num_tokens, num_unequal = compared(scorer, drawn(engine, count))
    print(f"{what}: {num_unequal} of {num_tokens} tokens are unequal", flush=True)
    yield measured(f"{what}: compared tokens", num_tokens, "tokens")
    yield measured(f"{what}: unequal tokens", num_unequal, "tokens", at_most=0)
    if coded := list(coded_shapes(spec, cfg.weights)):
        middle = engine.model.get_parameter(coded[len(coded) // 2])
        middle.view(torch.uint8)[3, 5] ^= 0x44
        engine.sink().commit(1)
        _, num_unequal = compared(scorer, drawn(engine, FEW))
        flipped = f"{what}: unequal tokens of {FEW} sequences after one code was flipped"
        yield measured(flipped, num_unequal, "tokens", at_least=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(QWEN3))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            spec = write_config(name, Path(folder))
        for kind in options.formats:
            rows += rows_of(name, kind, spec, options.sequences)
            gc.collect()
            torch.cuda.empty_cache()
    packages = ("torch", "triton", "flash-attn-4")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
