"""What `trainer.data_parts` costs over ranks that split the data, and the bits that it gives.

With `data_parts` and `deterministic`, gradients have the same bits on any number of ranks that
divides the parts (docs/resume.md). A step is learner.train_step on 64 sequences of 128 + 896
tokens, with the optimizer. One learner takes it in turns with `deterministic` alone, and with as
many and twice as many parts as ranks. Another one takes it without either setting. Values are
medians of the host's clock, of the rank that took longest, with the GPU drained before and after.

Then learners on one rank and on all ranks take two steps with as many parts as ranks. The weights
that follow and the norms of the gradients are compared bit for bit. `deterministic` alone is the
negative control: its sums depend on the ranks.

    torchrun --nproc-per-node 2 -m benchmarks.data_parts [--shapes 0.6B 4B] [--equal 0.6B 4B@9]
        [--repeats 4] [--save]

On a machine without GPUs, --shapes tiny --equal tiny tries the script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.rank_learners import Ranks, on_gpu, step_seconds
from benchmarks.record import compared, counted, measured
from benchmarks.table import Row
from benchmarks.training import batch, config, release, spec_of
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.backend import Fsdp2
from spmd_rl.train.learner import Learner
from spmd_rl.types.batch import Batch

BAR = 1.03
STEP_TOKENS, EQUAL_TOKENS, TRIED_TOKENS = 65536, 16384, 8192
EQUAL_STEPS = 2
ALONE, SPLIT = "one rank", "all ranks"
# so that gradients or a norm with other bits show in the weights
SENSITIVE = TrainerConfig(lr=1e-3, eps=1e-4, clip_norm=0.01, deterministic=True)


def own_part(whole: Batch, one: Learner) -> Batch:
    """Return this rank's shard, in as many parts as the learner's config says."""
    return whole.shard(one.context.data_size, one.cfg.data_parts)[one.context.data_rank]


def equal_tokens() -> int:
    return EQUAL_TOKENS if on_gpu() else TRIED_TOKENS


def sum_in_parts(one: Learner, num_parts: int) -> None:
    """Have a learner that was built with `data_parts` sum in other parts; 0 as without the setting.

    On a GPU these are all the places where a backend reads it.
    """
    backend, cfg = one.backend, replace(one.cfg, data_parts=num_parts)
    assert isinstance(backend, Fsdp2)
    one.cfg = cfg
    backend._accumulation = backend._accumulating(cfg)
    group = one.context.mesh.get_group("fsdp")
    backend._exact_norm_group = group if num_parts else None


def timed_rows(ranks: Ranks, name: str, repeats: int) -> Iterator[Row]:
    """Ranks: all."""
    spec, size = spec_of(name), ranks.world.size
    whole = batch(STEP_TOKENS if on_gpu() else TRIED_TOKENS, spec.vocab_size)
    what = f"Qwen3-{name} on {size} ranks"
    fixed = replace(config(name), deterministic=True, data_parts=size)
    one = ranks.learner(SPLIT, spec, fixed)
    found: dict[int, list[float]] = {0: [], size: [], 2 * size: []}
    ways = list(found)
    for turn in range(1 + repeats):
        first = turn % len(ways)
        for num_parts in ways[first:] + ways[:first]:
            sum_in_parts(one, num_parts)
            seconds = step_seconds(one, own_part(whole, one))
            ranks.say(f"{what}, {num_parts} parts: {seconds:.3f} s")
            if turn:
                found[num_parts].append(seconds)
    del one
    free = ranks.learner(SPLIT, spec, config(name))
    times = [step_seconds(free, own_part(whole, free)) for _ in range(1 + repeats)]
    ranks.say(f"{what}, neither setting: {times}")
    usual = statistics.median(found.pop(0))
    for num_parts, each in found.items():
        text, seconds = f"{what}, {num_parts} parts: step", statistics.median(each)
        peer = "deterministic alone"
        yield compared(text, seconds, "s", peer=peer, peer_value=usual, at_most=BAR)
        peer_value = statistics.median(times[1:])
        yield compared(text, seconds, "s", peer="neither setting", peer_value=peer_value)


def trained(
    ranks: Ranks, split: str, name: str, cfg: TrainerConfig
) -> tuple[dict[str, Tensor], list[str]]:
    """Return whole weights after some steps, and the norms of gradients as bits.

    Ranks: all of the split. Weights are on the device.
    """
    began = time.perf_counter()
    spec = spec_of(name)
    one = ranks.learner(split, spec, cfg)
    whole = batch(equal_tokens(), spec.vocab_size)
    norms = [
        one.train_step(own_part(whole, one), grpo_loss)["train/grad_norm"].hex()
        for _ in range(EQUAL_STEPS)
    ]
    weights = {}
    for each in one.backend.names():
        weight = one.backend.gather(each)  # a collective
        if ranks.world.rank == 0:
            weights[each] = weight.detach().clone()
    took = time.perf_counter() - began
    ranks.say(f"{name}, {split}, {cfg.data_parts} parts: norms {norms}, after {took:.1f} s")
    return weights, norms


def compared_with_one(ranks: Ranks, name: str, cfg: TrainerConfig) -> tuple[list[bool], list[bool]]:
    """Return which weights, and which norms, of all ranks have the bits of one rank's.

    Ranks: all. What the first one returns counts.
    """
    alone: dict[str, Tensor] = {}

    def take_alone() -> list[str]:
        weights, norms = trained(ranks, ALONE, name, cfg)
        alone.update(weights)
        return norms

    norms_alone = ranks.alone(take_alone)
    weights, norms = trained(ranks, SPLIT, name, cfg)
    equal = [torch.equal(weight, weights[each]) for each, weight in alone.items()]
    return equal, [one == other for one, other in zip(norms, norms_alone, strict=True)]


def equal_rows(ranks: Ranks, name: str) -> Iterator[Row]:
    """Ranks: all. The rows of the first one count."""
    size = ranks.world.size
    usual, max_tokens = config(name), equal_tokens() // 4
    cfg = replace(SENSITIVE, dtype=usual.dtype, backend=usual.backend, max_tokens=max_tokens)
    for num_parts in (size, 0):
        equal, norms = compared_with_one(ranks, name, replace(cfg, data_parts=num_parts))
        what = f"Qwen3-{name}, {EQUAL_STEPS} steps on {size} ranks beside one, {num_parts} parts"
        unequal, text = len(equal) - sum(equal), f"{what}: unequal of {len(equal)} weights"
        if num_parts:
            yield measured(text, unequal, "tensors", at_most=0)
            yield counted(f"{what}: equal norms of gradients", norms)
        else:
            yield measured(text, unequal, "tensors", at_least=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", default=["0.6B", "4B"], help="that are timed")
    parser.add_argument("--equal", nargs="*", default=["0.6B", "4B@9"], help="that are compared")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    ranks = Ranks({ALONE: RoleSplit(ranks="0-0"), SPLIT: RoleSplit()})
    rows: list[Row] = []
    for name in options.equal:
        rows += equal_rows(ranks, name)
        release()
    for name in options.shapes:
        rows += timed_rows(ranks, name, options.repeats)
        release()
    return ranks.finish(__file__, rows, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
