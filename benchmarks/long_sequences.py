"""A training step on one long sequence whose tokens ranks share (split.train.cp), beside one rank.

One rank takes the step alone, then all ranks take it together with `cp` = their number. Layers keep
their inputs alone (recompute = "all"). Both learners have the same weights, and the log-probs of
both are compared bit for bit, in a forward pass and in a training pass.

The peer is the ideal split: a rank's time alone over the number of ranks. In it ranks share all
that a step does (products, attention, the head, the loss, and the optimizer, since FSDP shards
weights over ranks along cp too), and exchange nothing. What is above it are the gathers of weights,
the sums of gradients, the two all-to-alls of each attention, and whatever ranks do twice.

    torchrun --nproc-per-node 2 -m benchmarks.long_sequences [--shape 4B@18] [--tokens 65536]
        [--repeats 2] [--profile] [--save]

"SIZE@N" has N layers. Values are medians of the host's clock around a step, of the rank that took
longest, with the GPU drained before and after. With --profile one more step of each is profiled,
and says what the first rank's GPU did. On a machine without GPUs, --shape tiny --tokens 512 tries
the script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_time import gpu_time
from benchmarks.rank_learners import Ranks, on_gpu, peak_gib, step_seconds
from benchmarks.record import compared, measured
from benchmarks.table import Row
from benchmarks.training import batch, config, release, spec_of
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import Fsdp2Config
from spmd_rl.train.learner import Learner
from spmd_rl.train.on_policy import COMPARED, MISMATCHED
from spmd_rl.types.batch import Batch

BAR = 1.10
ALONE, SHARED = "one rank", "all ranks"


@dataclass(frozen=True)
class Found:
    """What the steps of a learner took, its first log-probs, and the metrics of its first step."""

    seconds: float
    gibibytes: float
    logprobs: NDArray[np.float32]
    metrics: dict[str, float]
    seconds_of: dict[str, float] = field(default_factory=dict)  # what a GPU did (gpu_time.py)


def measure(
    ranks: Ranks, split: str, given: Batch, wanted: NDArray[np.float32] | None, options: Options
) -> Found:
    """Return what a learner over the ranks of a split finds. Ranks: all of the split.

    The first step compares its log-probs with those `wanted`, or with its own of a forward pass.
    """
    began = time.perf_counter()
    spec = replace(spec_of(options.shape), max_positions=options.tokens)
    cfg = replace(config(options.shape), backend=Fsdp2Config(recompute="all"))
    one = ranks.learner(split, spec, cfg)
    ranks.say(f"{split}: built after {time.perf_counter() - began:.1f} s")
    logprobs = one.score(given)
    given = replace(given, rollout_logprobs=logprobs if wanted is None else wanted)
    metrics = one.train_step(given, grpo_loss)
    ranks.say(f"{split}: first step after {time.perf_counter() - began:.1f} s")
    gibibytes = peak_gib(one, given)
    found = []
    for _ in range(options.repeats):
        found.append(step_seconds(one, given))
        ranks.say(f"{split}: {found[-1]:.3f} s")
    seconds_of = profiled(one, given) if options.profile else {}
    return Found(statistics.median(found), gibibytes, logprobs, metrics, seconds_of)


def profiled(one: Learner, given: Batch) -> dict[str, float]:
    return gpu_time(lambda: step_seconds(one, given))


def rows_of(what: str, cp: int, alone: Found, shared: Found) -> Iterator[Row]:
    yield measured(f"{what}, {ALONE}: step", alone.seconds, "s")
    yield compared(
        f"{what}, cp {cp}: step",
        shared.seconds,
        "s",
        peer=f"the ideal split of {ALONE}'s step",
        peer_value=alone.seconds / cp,
        at_most=BAR,
    )
    unequal = int((alone.logprobs.view(np.int32) != shared.logprobs.view(np.int32)).sum())
    scored = int(alone.metrics[COMPARED])
    text = f"{what}, cp {cp}: unequal log-probs of {scored} tokens"
    yield measured(f"{text}, forward pass", unequal, "tokens", at_most=0)
    yield measured(f"{text}, training pass", shared.metrics[MISMATCHED], "tokens", at_most=0)
    for name, found in {ALONE: alone, f"cp {cp}": shared}.items():
        for kind, seconds in found.seconds_of.items():
            yield measured(f"{what}, {name}: {kind} in a profiled step", seconds, "s")
    if on_gpu():
        yield compared(
            f"{what}, cp {cp}: peak memory",
            shared.gibibytes,
            "GiB",
            peer=ALONE,
            peer_value=alone.gibibytes,
        )


class Options(argparse.Namespace):
    shape: str
    tokens: int
    repeats: int
    profile: bool
    save: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="4B@18")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(namespace=Options())
    cp = World.from_env().size
    ranks = Ranks({ALONE: RoleSplit(ranks="0-0"), SHARED: RoleSplit(cp=cp)})
    given = batch(options.tokens, spec_of(options.shape).vocab_size, options.tokens)
    alone = ranks.alone(lambda: measure(ranks, ALONE, given, None, options))
    release()
    shared = measure(ranks, SHARED, given, alone.logprobs, options)
    what = f"Qwen3-{options.shape}, a sequence of {options.tokens:,} tokens"
    return ranks.finish(__file__, list(rows_of(what, cp, alone, shared)), save=options.save)


if __name__ == "__main__":
    sys.exit(main())
