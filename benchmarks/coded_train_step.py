"""Training step with weights and cache in few bits beside bfloat16, with Qwen3's shapes on one GPU.

A step is that of train_step.py, with the optimizer. It is taken first in bfloat16, then in each
format, and in bfloat16 again. Values are medians of the host's clock around it, with the GPU
drained before and after. "SIZE@N" has N layers, so that its training fits.

    python -m benchmarks.coded_train_step [0.6B 4B@18] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from benchmarks.train_step import PACKAGES, STEP_TOKENS, WARMUPS, step_seconds
from benchmarks.training import batch, config, learner, scored
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.on_policy import COMPARED, MISMATCHED

BAR = 1.03
USUAL = "bfloat16"
FORMATS = {
    USUAL: {},
    "e4m3": {"weights": "e4m3"},
    "e4m3 with its cache": {"weights": "e4m3", "cache": "e4m3"},
    "int4": {"weights": "int4"},
}


def steps_of(name: str, cfg: TrainerConfig, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each step, and the metrics of one on the learner's own log-probs."""
    one = learner(name, cfg)
    given = scored(one, batch(STEP_TOKENS, one.backend.scorer.model.spec.vocab_size))
    metrics = one.train_step(given, grpo_loss)
    seconds = [step_seconds(one, given) for _ in range(WARMUPS + repeats)]
    return seconds[WARMUPS:], metrics


def rows_of(name: str, repeats: int) -> Iterator[Row]:
    found: dict[str, list[float]] = {}
    for kind in (*FORMATS, USUAL):
        seconds, metrics = steps_of(name, replace(config(name), **FORMATS[kind]), repeats)
        torch.cuda.empty_cache()
        found.setdefault(kind, []).extend(seconds)
        print(f"{kind}: {seconds}", flush=True)
        what = f"Qwen3-{name}, {kind}: mismatched of {metrics[COMPARED]:.0f} tokens"
        if len(found[kind]) == repeats:
            yield measured(what, metrics[MISMATCHED], "tokens", at_most=0)
    usual = statistics.median(found.pop(USUAL))
    for kind, seconds in found.items():
        yield compared(
            f"Qwen3-{name}, {kind}: step",
            statistics.median(seconds),
            "s",
            peer=USUAL,
            peer_value=usual,
            at_most=BAR,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["0.6B"])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [row for name in options.models for row in rows_of(name, options.repeats)]
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
