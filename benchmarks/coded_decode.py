"""Decoding steps of the native engine with weights in 8 bits, beside bfloat16 with their numbers.

Both engines draw the same tokens, which are compared with their log-probs. A step's time is the
median over the steps in which all sequences run.

    python -m benchmarks.coded_decode [0.6B | 4B | 8B] [--save]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.record import compared, counted, finish, gpu, gpu_machine
from benchmarks.shapes import QWEN3, random_weights, write_config
from benchmarks.table import Row
from spmd_rl.model.hf import fill
from spmd_rl.model.low_precision.coded_tensors import as_codes, as_rounded, hold_codes
from spmd_rl.model.low_precision.coded_weights import WeightFormat
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

BATCHES = (1, 64, 256)
PROMPT, ANSWER = 128, 192
CFG = NativeEngineConfig(dtype="bfloat16", max_batch=max(BATCHES), num_pages=1024)
DEVICE = torch.device("cuda")


def engine_of(spec: ModelSpec, weights: WeightFormat) -> NativeEngine:
    with torch.device("meta"):
        model = CausalLM(spec).to(torch.bfloat16).requires_grad_(False)
        hold_codes(model, spec, weights)
    model.to_empty(device=DEVICE)
    convert = as_codes if weights == "e4m3" else as_rounded
    fill(model, convert(random_weights(spec), spec, "e4m3"))
    engine = NativeEngine(model, replace(CFG, weights=weights), DEVICE)
    engine.sink().commit(0)
    return engine


def measure(engine: NativeEngine, batch: int) -> tuple[float, dict[int, bytes]]:
    """Return the milliseconds of a step, and tokens and log-probs of each sample."""
    rng = np.random.default_rng(batch)
    sampling = SamplingConfig(max_tokens=ANSWER, ignore_eos=True)
    for uid in range(batch):
        prompt = rng.integers(2, 1000, PROMPT).astype(np.int32)
        engine.submit(Request(uid, 0, prompt, sampling, seed=1))
    times, drawn = [], {}
    while engine.has_work:
        began = time.perf_counter()
        output = engine.step()
        torch.cuda.synchronize()
        if len(output.tokens) == batch:
            times.append(1e3 * (time.perf_counter() - began))
        for one in output.finished:
            drawn[one.prompt_uid] = one.tokens.tobytes() + one.logprobs.tobytes()
    return statistics.median(times[20:-2]), drawn


def compare(name: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        spec = write_config(name, Path(folder))
    found = {}
    for weights in ("full", "e4m3"):
        engine = engine_of(spec, weights)
        measure(engine, 2)
        found[weights] = {batch: measure(engine, batch) for batch in BATCHES}
        del engine
        torch.cuda.empty_cache()
    rows = []
    for batch in BATCHES:
        (bf16, expected), (coded, drawn) = found["full"][batch], found["e4m3"][batch]
        what = f"Qwen3-{name}, step of {batch}"
        print(f"{what}: {coded:.3f} ms, bf16 {bf16:.3f} ms, {bf16 / coded:.2f}x", flush=True)
        rows.append(compared(what, coded, "ms", peer="bf16", peer_value=bf16))
        rows.append(counted(f"{what}: equal samples", [drawn[u] == expected[u] for u in expected]))
    return rows


def main() -> int:
    names = [name for name in QWEN3 if name in sys.argv] or list(QWEN3)
    rows = [row for name in names for row in compare(name)]
    packages = ("torch", "triton")
    return finish(
        __file__, packages, rows, save="--save" in sys.argv, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
