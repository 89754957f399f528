"""Cost of batch-invariant bits in the engine: its decode step beside engines that are free of them.

Three engines take turns. They share the scheduler, graphs and all kernels except matrix products.
In the two free engines, each shape uses the fastest product of all: cuBLAS's candidates, with
split-K or not, and ours. One free engine fuses gate and up as shipped, in one kernel with the
activation if there are few rows. The other has separate products. The faster of the two is the
peer. FlashAttention is the same in all; on Hopper it uses at most one split, for few long sequences
(attention_decode.py).

The time of a step is the median over steps that decode all sequences. It is measured on the host
from one step to the next, as in hash_cost.py. Rows have medians over turns.

    python -m benchmarks.engine_cost [--save] [0.6B 8B]
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from benchmarks.cublas import every_way
from benchmarks.hash_cost import sequences, step_s
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_folder
from benchmarks.table import Row
from benchmarks.train_variants import Race, swapped
from spmd_rl.kernels.linear import dispatch, swiglu
from spmd_rl.kernels.linear.cublaslt import Gemm, Shape
from spmd_rl.kernels.linear.dispatch import own_matmul_into
from spmd_rl.microscope.replay.forward_pass import load_model
from spmd_rl.rollout.engine import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

BATCHES, TURNS = (1, 64, 256), 5
NUM_PAGES = 800  # of 128 tokens: 256 sequences of two, and one more for each
MODELS = ("0.6B", "8B")
BAR = 1.03
DEVICE = torch.device("cuda")


def all_ways(shape: Shape) -> list[Gemm]:
    return [own_matmul_into, *every_way(shape)]


PRODUCTS = ((dispatch, "matmul", Race(all_ways)),)
APART = (*PRODUCTS, (swiglu, "choose_gated_tile", lambda num_rows, half: None))
PATHS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "contract": nullcontext,
    "free": lambda: swapped(*PRODUCTS),
    "free, gate and up apart": lambda: swapped(*APART),
}


def engine(folder: Path) -> NativeEngine:
    cfg = NativeEngineConfig(
        dtype="bfloat16",
        page_size=128,
        num_pages=NUM_PAGES,
        max_batch=max(BATCHES),
        max_step_tokens=8192,
    )
    made = NativeEngine(load_model(folder, torch.bfloat16, DEVICE), cfg, DEVICE)
    made.sink().commit(0)
    return made


def measure(name: str, folder: Path) -> Iterator[Row]:
    write_folder(name, folder)
    engines = {path: engine(folder) for path in PATHS}
    for batch in BATCHES:
        times: dict[str, list[float]] = {path: [] for path in PATHS}
        for _ in range(1 + TURNS):
            for path, context in PATHS.items():
                case = sequences(batch, engines[path].spec.vocab_size)
                with context():
                    times[path].append(1e3 * step_s(engines[path], case))
        ours, *free = (statistics.median(found[1:]) for found in times.values())
        what = f"Qwen3-{name}, batch {batch}: step"
        yield compared(
            what, ours, "ms", peer="free of the contract", peer_value=min(free), at_most=BAR
        )
        for path, value in zip(list(PATHS)[1:], free, strict=True):
            yield measured(f"{what}, {path}", value, "ms")


def main(words: list[str]) -> int:
    rows: list[Row] = []
    for name in [word for word in words if not word.startswith("--")] or MODELS:
        with tempfile.TemporaryDirectory(prefix="cost-") as folder:
            for row in measure(name, Path(folder)):
                print(row, flush=True)
                rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
    packages = ("torch", "triton", "flash-attn-4")
    return finish(__file__, packages, rows, save="--save" in words, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
