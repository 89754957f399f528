"""Training step with and without an entropy bonus, with Qwen3's shapes on one GPU.

The two steps take turns in one process, and the first one changes with each repetition. A step is
learner.train_step on 64 sequences of 128 + 896 tokens in packs of 16,384, with the optimizer. The
bonus is 0.01 times the entropy, whose gradient goes through the head. Values are medians of the
host's clock around a step, with the GPU drained before and after.

    python -m benchmarks.entropy_bonus [--shape 0.6B] [--shape 4B] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from benchmarks.training import batch, config, learner, scored
from spmd_rl.algo.losses import LossInput, Needs, grpo_loss
from spmd_rl.train.learner import Learner
from spmd_rl.types.batch import Batch

PACKAGES = ("torch", "triton", "flash-attn-4")
STEP_TOKENS = 65536
BAR, MEMORY_BAR = 1.03, 1.01
COEFFICIENT, WARMUPS = 0.01, 2
WITH, WITHOUT = "with an entropy bonus", "without"


def bonus_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    loss, measures = grpo_loss(out)
    return loss - COEFFICIENT * out.entropy, measures


STEPS = {WITHOUT: (grpo_loss, Needs()), WITH: (bonus_loss, Needs(entropy=True))}


def step(one: Learner, given: Batch, name: str) -> tuple[float, float]:
    """Return seconds and peak GiB of a step."""
    loss, needs = STEPS[name]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    one.train_step(given, loss, needs=needs)
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30


def measure(shape: str, repeats: int) -> Iterator[Row]:
    cfg = config(shape)
    one = learner(shape, cfg)
    given = scored(one, batch(STEP_TOKENS, one.backend.scorer.model.spec.vocab_size))
    what = f"Qwen3-{shape}, packs of {cfg.max_tokens}, recompute {cfg.backend.recompute}"
    names = list(STEPS)
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for repeat in range(WARMUPS + repeats):
        for name in names if repeat % 2 else reversed(names):
            taken = step(one, given, name)
            if repeat >= WARMUPS:
                steps[name].append(taken)
            print(f"{what}, {name}: {taken[0]:.4f} s, {taken[1]:.2f} GiB", flush=True)
    seconds = {name: statistics.median(s for s, _ in steps[name]) for name in names}
    peaks = {name: max(gib for _, gib in steps[name]) for name in names}
    yield compared(
        f"{what}: step {WITH}",
        seconds[WITH],
        "s",
        peer=WITHOUT,
        peer_value=seconds[WITHOUT],
        at_most=BAR,
    )
    pairs = zip(steps[WITH], steps[WITHOUT], strict=True)
    ratios = [bonus[0] / plain[0] for bonus, plain in pairs]
    yield measured(
        f"{what}: median ratio of neighbouring steps", statistics.median(ratios), "", at_most=BAR
    )
    yield compared(
        f"{what}: peak memory {WITH}",
        peaks[WITH],
        "GiB",
        peer=WITHOUT,
        peer_value=peaks[WITHOUT],
        at_most=MEMORY_BAR,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=("0.6B", "4B"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for shape in options.shape or ["0.6B"]:
        rows += measure(shape, options.repeats)
        torch.cuda.empty_cache()
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
