"""Decoding steps of the native engine with weights and cache in few bits, beside bfloat16.

Engines with one format of the cache draw the same tokens, whether they hold codes or the numbers
that these stand for. Both are compared with their log-probs.

    python -m benchmarks.coded_decode [0.6B 4B 8B 30B-A3B] [--weights e4m3 int4]
        [--caches full e4m3] [--batches 1 64 256] [--prompt 4096] [--save]
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.coded_engine import engine_of, measure
from benchmarks.record import compared, counted, finish, gpu, gpu_machine
from benchmarks.shapes import MIXTURE, QWEN3, write_config
from benchmarks.table import Row
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import CacheFormat
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.native.config import GPU_PAGE_SIZE, NativeEngineConfig

ANSWER = 192
USUAL_PROMPTS = {MIXTURE: 1024}  # of other models: 128
BATCHES = {MIXTURE: (64, 256)}
# times as fast as bfloat16, by batch
BARS = {"8B": {1: 1.5, 64: 1.35, 256: 1.0}, MIXTURE: {64: 1.6, 256: 1.4}}
Found = dict[int, tuple[float, dict[int, bytes]]]


def measured_engine(
    spec: ModelSpec,
    numbers: WeightFormat,
    weights: WeightFormat,
    cache: CacheFormat,
    cases: tuple[int, list[int]],
) -> Found:
    """Return of each batch the time of a step and what was drawn."""
    prompt, batches = cases
    pages = -(-(prompt + ANSWER + 1) // GPU_PAGE_SIZE) * max(batches)
    cfg = NativeEngineConfig(
        dtype="bfloat16",
        max_batch=2 * max(batches),  # the last rows would wait for others to end
        num_pages=pages + 2 * max(batches),
        weights=weights,
        cache=cache,
    )
    engine = engine_of(spec, cfg, numbers)
    measure(engine, min(2, *batches), prompt, ANSWER)
    found = {batch: measure(engine, batch, prompt, ANSWER) for batch in batches}
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def compare(name: str, numbers: WeightFormat, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        spec = write_config(name, Path(folder))
    batches = options.batches or list(BATCHES.get(name, (1, 64, 256)))
    prompt = options.prompt or USUAL_PROMPTS.get(name, 128)
    usual: Found = {}
    for cache in options.caches:
        whole = measured_engine(spec, numbers, "full", cache, (prompt, batches))
        coded = measured_engine(spec, numbers, numbers, cache, (prompt, batches))
        usual = usual or whole
        for found in (whole, coded):
            if found is usual:
                continue
            for batch, (step, drawn) in found.items():
                held = numbers if found is coded else f"numbers of {numbers}"
                what = f"Qwen3-{name}, {held}, cache {cache}"
                what += f", step of {batch} after prompts of {prompt}"
                bf16 = usual[batch][0]
                print(f"{what}: {step:.3f} ms, bf16 {bf16:.3f} ms, {bf16 / step:.2f}x", flush=True)
                bar = BARS.get(name, {}).get(batch) if found is coded else None
                most = 1 / bar if bar else None
                yield compared(what, step, "ms", peer="bf16", peer_value=bf16, at_most=most)
                if found is coded:
                    equal = [drawn[uid] == one for uid, one in whole[batch][1].items()]
                    yield counted(f"{what}: samples equal to those of the rounded engine", equal)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(QWEN3))
    parser.add_argument("--weights", nargs="+", choices=("e4m3", "int4"), default=["e4m3"])
    parser.add_argument("--caches", nargs="+", choices=("full", "e4m3"), default=["full"])
    parser.add_argument("--batches", type=int, nargs="+", help="by default 1, 64 and 256")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [
        row
        for name in options.models
        for numbers in options.weights
        for row in compare(name, numbers, options)
    ]
    packages = ("torch", "triton")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
