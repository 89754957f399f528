"""Cost of a KL term to a reference model, with Qwen3's shapes on one GPU.

A step with the term scores the batch with a frozen reference, gives the trainer its log-probs as a
column, and takes learner.train_step with `kl_coef`. The plain step is learner.train_step alone. The
term costs what the first takes longer. A forward pass is the trainer's own score of the same batch,
64 sequences of 128 + 896 tokens in packs of 16,384. The three take turns in one process. Values are
medians of the host's clock, with the GPU drained before and after.

    python -m benchmarks.reference_cost [--shape 0.6B] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import random_weights, write_config
from benchmarks.table import Row
from benchmarks.training import batch, config, learner, scored
from spmd_rl.algo.policy_loss import policy_loss
from spmd_rl.kernels.runtime.interleaved_timing import shuffled_turns
from spmd_rl.train.batch_runner import BatchRunner
from spmd_rl.train.build import build_frozen
from spmd_rl.train.config import FrozenConfig
from spmd_rl.train.learner import Learner

PACKAGES = ("torch", "triton", "flash-attn-4")
STEP_TOKENS = 65536
BAR = 1.1
KL_COEF = 0.01
WARM_UPS = 2


def reference(shape: str, one: Learner) -> BatchRunner:
    """Return a runner of a frozen model with the learner's first weights."""
    cfg = replace(FrozenConfig.like(one.cfg), init="random")
    with tempfile.TemporaryDirectory() as folder:
        spec = write_config(shape, Path(folder))
        model = build_frozen(cfg, folder, one.context)
    model.fill(random_weights(spec))
    return BatchRunner(model, one.context, cfg.max_tokens)


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(shape: str, repeats: int) -> Iterator[Row]:
    one = learner(shape, config(shape))
    frozen = reference(shape, one)
    given = scored(one, batch(STEP_TOKENS, one.backend.scorer.model.spec.vocab_size))
    distance = float(abs(frozen.score(given).values - given.rollout_logprobs).max())

    def with_term() -> None:
        columns = given.with_columns(reference_logprobs=frozen.score(given))
        one.train_step(columns, partial(policy_loss, kl_coef=KL_COEF))

    works: dict[str, Callable[[], object]] = {
        "with": with_term,
        "without": lambda: one.train_step(given, policy_loss),
        "forward": lambda: one.score(given),
    }
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn, index in shuffled_turns(len(names), WARM_UPS + repeats):
        taken = seconds(works[names[index]])
        if turn >= WARM_UPS:
            times[names[index]].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    what = f"Qwen3-{shape}, {STEP_TOKENS} tokens"
    yield measured(
        f"{what}: largest distance of the reference's log-probs", distance, "", at_most=0
    )
    yield measured(f"{what}: step with a KL term", medians["with"], "s")
    yield measured(f"{what}: step without", medians["without"], "s")
    yield compared(
        f"{what}: cost of the KL term",
        medians["with"] - medians["without"],
        "s",
        peer="a forward pass",
        peer_value=medians["forward"],
        at_most=BAR,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6B", choices=("0.6B", "4B"))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = list(measure(options.shape, options.repeats))
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
