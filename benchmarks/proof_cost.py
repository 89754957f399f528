"""Cost of the proof: the comparison of every token's log-prob, as a share of the training step.

The comparison is timed between two CUDA events on its stream, so kernels and gaps both count. The
time on the host is reported too, although the host runs while the GPU does the backward pass. Whole
steps with and without the comparison also take turns. They have no bar, because their noise is
larger than the difference. The step is that of train_step.py.

    python -m benchmarks.proof_cost 0.6B 4B [--save]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from benchmarks.train_step import PACKAGES, STEP_TOKENS, step_seconds
from benchmarks.training import batch, config, learner, scored
from spmd_rl.train import learner as learner_module
from spmd_rl.train.metric_sums import MetricSums
from spmd_rl.train.on_policy import COMPARED, DRAWN, K1, K3, MAX_DLOGP, MEAN_DLOGP, MISMATCHED

REPEATS, WARMUPS = 9, 2
BAR = 0.01
RATIOS = ("ratio", "square_ratio")
COUNTED = (COMPARED, MISMATCHED, "tokens", DRAWN, MEAN_DLOGP, K1, K3, *RATIOS)


class Watched:
    """The comparison, with its time on the GPU and on the host."""

    def __init__(self) -> None:
        self.compare = learner_module.compare_with_rollout
        self.host_s = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, *args: object) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        self.compare(*args)  # type: ignore[arg-type]
        end.record()
        self.host_s += time.perf_counter() - start
        self.events.append((begin, end))

    def gpu_s(self) -> float:
        return sum(begin.elapsed_time(end) for begin, end in self.events) * 1e-3


class LeftOut:
    """A replacement of the comparison that returns zeros as its metrics."""

    def __init__(self) -> None:
        self.seen: MetricSums | None = None

    def __call__(self, logprobs: Tensor, micro: object, version: int, sums: MetricSums) -> None:
        if sums is not self.seen:
            self.seen, zero = sums, logprobs.new_zeros(1)
            sums.add_each(dict.fromkeys(COUNTED, zero))
            sums.add_maximum(MAX_DLOGP, zero)


def measure(name: str) -> Iterator[Row]:
    one = learner(name, config(name))
    given = scored(one, batch(STEP_TOKENS, one.backend.scorer.model.spec.vocab_size))
    shares, host, times, others = [], [], [], []
    for repeat in range(WARMUPS + REPEATS):
        watched = Watched()
        with patch.object(learner_module, "compare_with_rollout", watched):
            seconds = step_seconds(one, given)
        with patch.object(learner_module, "compare_with_rollout", LeftOut()):
            without = step_seconds(one, given)
        if repeat >= WARMUPS:
            shares.append(watched.gpu_s() / seconds)
            host.append(watched.host_s / seconds)
            times.append(seconds)
            others.append(without)
    what, median = f"Qwen3-{name}: comparison", statistics.median
    yield measured(f"{what}, share of the step", median(shares), "", at_most=BAR)
    yield measured(f"{what}, share of the host's time", median(host), "")
    yield compared(
        f"{what}, whole step", median(times), "s", peer="without", peer_value=median(others)
    )


def main() -> int:
    rows: list[Row] = []
    for name in [one for one in sys.argv[1:] if one != "--save"]:
        rows += measure(name)
        torch.cuda.empty_cache()
    return finish(
        __file__, PACKAGES, rows, save="--save" in sys.argv, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
