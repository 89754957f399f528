"""Room for keys and values beside a mixture of 30B parameters in few bits, on one card of 80 GB.

The engine has Qwen3-30B-A3B's shape and sizes its cache as in a run: 0.9 of the card's memory, less
what the plan counts beside pages. Of a larger card it takes as much as a card of 80 GB has. Then it
generates with 64 sequences after prompts of 1,024 tokens.

    python -m benchmarks.coded_memory [--weights e4m3 int4] [--save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.coded_engine import DEVICE, engine_of, measure
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import MIXTURE, write_config
from benchmarks.table import Row
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.memory import engine_memory
from spmd_rl.rollout.native.config import NativeEngineConfig

CARD_BYTES = 85_000_000_000  # of an H100 with 80 GB, as its driver counts them
FRACTION, BAR_GB = 0.9, 35.0
BATCH, PROMPT, ANSWER = 64, 1024, 128
GB = 1e9


def rows_of(spec: ModelSpec, weights: WeightFormat) -> Iterator[Row]:
    capacity = torch.cuda.mem_get_info(DEVICE)[1]
    fraction = FRACTION * min(1.0, CARD_BYTES / capacity)
    cfg = NativeEngineConfig(dtype="bfloat16", memory_fraction=fraction, weights=weights)
    planned = {one.tag: one.num_bytes for one in engine_memory(spec, cfg, on_gpu=True)}
    engine = engine_of(spec, cfg, weights, sum(planned.values()))
    held = engine.stats()["kv_bytes"]
    step, drawn = measure(engine, BATCH, PROMPT, ANSWER)
    peak = held + torch.cuda.max_memory_reserved(DEVICE)  # pages are not torch's memory
    what = f"Qwen3-{MIXTURE} in {weights}"
    yield measured(f"{what}: weights, as planned", planned["weights"] / GB, "GB")
    yield measured(f"{what}: memory of the cache", held / GB, "GB", at_least=BAR_GB)
    yield measured(f"{what}: most memory, with the cache", peak / GB, "GB", at_most=CARD_BYTES / GB)
    yield measured(f"{what}: samples of {ANSWER} tokens", len(drawn), "", at_least=BATCH)
    yield measured(f"{what}: step of {BATCH} after prompts of {PROMPT}", step, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", choices=("e4m3", "int4"), default=["e4m3"])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = write_config(MIXTURE, Path(folder))
    rows: list[Row] = []
    for weights in options.weights:
        rows += rows_of(spec, weights)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
    packages = ("torch", "triton")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
