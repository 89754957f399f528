"""Training step on one GPU with sequences of mixed lengths, in packs of up to 16,384 rows.

It is like train_step.py, whose packs are full. Our contract path takes turns with the same trainer
whose matrix products are left to cuBLAS; values are medians of whole steps. The time per token is
the contract path's step over all tokens, beside that of sequences of one length. The log-probs that
the step's are compared with come from other packs.

    python -m benchmarks.mixed_lengths 0.6B 4B [--save]
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
from benchmarks.train_step import PACKAGES, SPEED_BAR, STEP_TOKENS, WARMUPS, step_seconds
from benchmarks.train_variants import VARIANTS
from benchmarks.training import batch, config, learner, mixed_batch, scored
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.runtime.interleaved_timing import shuffled_turns
from spmd_rl.train.learner import Learner
from spmd_rl.train.on_policy import COMPARED, MISMATCHED
from spmd_rl.types.batch import Batch

REPEATS = 6
OTHER_PACKS = 5000  # rows of the packs for the log-probs to compare with


def medians(one: Learner, works: dict[tuple[str, str], Batch]) -> dict[tuple[str, str], float]:
    """Return the seconds of a step by (lengths, variant)."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for turn, index in shuffled_turns(len(works), WARMUPS + REPEATS):
        key = list(works)[index]
        with VARIANTS[key[1]]():
            seconds = step_seconds(one, works[key])
        print(*key, f"{seconds:.3f} s", flush=True)
        if turn >= WARMUPS:
            times[key].append(seconds)
    return {key: statistics.median(found) for key, found in times.items()}


def measure(name: str) -> Iterator[Row]:
    cfg = config(name)
    one = learner(name, cfg)
    vocab = one.backend.scorer.model.spec.vocab_size
    apart = Learner(one.backend, one.context, replace(cfg, max_tokens=OTHER_PACKS))
    mixed, even = (scored(apart, made(STEP_TOKENS, vocab)) for made in (mixed_batch, batch))
    metrics = one.train_step(mixed, grpo_loss)
    what = (
        f"Qwen3-{name}, {len(mixed.lengths)} sequences of {min(mixed.lengths)} to "
        f"{max(mixed.lengths)} tokens"
    )
    yield measured(
        f"{what}: mismatched of {metrics[COMPARED]:.0f} tokens",
        metrics[MISMATCHED],
        "tokens",
        at_most=0,
    )
    works = {("mixed", "contract"): mixed, ("mixed", "free"): mixed, ("even", "contract"): even}
    times = medians(one, works)
    ours, free = times["mixed", "contract"], times["mixed", "free"]
    yield compared(f"{what}: step", ours, "s", peer="free", peer_value=free, at_most=SPEED_BAR)
    each, other = ours / sum(mixed.lengths), times["even", "contract"] / sum(even.lengths)
    yield compared(
        f"{what}: a token", 1e6 * each, "us", peer="sequences of 1,024", peer_value=1e6 * other
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        rows += measure(name)
        torch.cuda.empty_cache()
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
