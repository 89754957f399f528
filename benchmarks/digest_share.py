"""Digests of both ends of every push, as a share of the training step, with Qwen3's shapes.

A learner and a native engine share one GPU. In turns the learner takes a step, its weights are
pushed, and the digests of masters and engine are compared, as a run with `run.verify_every=1` does.
A step is learner.train_step on 64 sequences of 128 + 896 tokens in packs of 16,384, with the
optimizer; a run generates besides. Values are medians of the host's clock, with the GPU drained
before and after.

    python -m benchmarks.digest_share [--shape 0.6B] [--shape 4B] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.push_recipe import engine
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from benchmarks.training import batch, config, learner, scored
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.verification import Verifier

PACKAGES = ("torch", "triton", "flash-attn-4")
STEP_TOKENS, KV_PAGES = 65536, 16
WARM_UPS, BAR = 2, 0.02
STEP, PUSH, COMPARE = "step", "push", "compare"


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(shape: str, repeats: int) -> Iterator[Row]:
    one = learner(shape, config(shape))
    given = scored(one, batch(STEP_TOKENS, one.backend.scorer.model.spec.vocab_size))
    device = one.backend.device
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        sink = engine(folder, device, KV_PAGES).sink()
    source = one.backend.source()
    plan = plan_moves([source.layout(0)], [sink.layout(0)], None, 0)
    ends = LocalEnds(0, source, sink, device)
    pushes, verifier = Executor(plan.moves, ends), Verifier(plan.moves, plan.replicas, ends)
    unequal: list[int] = []
    works: dict[str, Callable[[], object]] = {
        STEP: lambda: one.train_step(given, grpo_loss),
        PUSH: lambda: pushes.run(None),
        COMPARE: lambda: unequal.append(verifier.compare(None).num_unequal),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(WARM_UPS + repeats):
        for name, work in works.items():
            taken = seconds(work)
            print(f"Qwen3-{shape}, {name}: {taken:.5f} s", flush=True)
            if repeat >= WARM_UPS:
                times[name].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    what = f"Qwen3-{shape}"
    yield measured(f"{what}: tensors that differ", sum(unequal), "tensors", at_most=0)
    yield measured(f"{what}: push within the process", medians[PUSH] * 1e3, "ms")
    yield measured(f"{what}: comparing both ends", medians[COMPARE] * 1e3, "ms")
    yield measured(f"{what}: training step", medians[STEP], "s")
    yield measured(
        f"{what}: comparing both ends, share of the training step",
        medians[COMPARE] / medians[STEP],
        "",
        at_most=BAR,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=("0.6B", "4B"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for shape in options.shape or ["0.6B"]:
        rows += measure(shape, options.repeats)
        torch.cuda.empty_cache()
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
