"""Training step of Megatron-core on several GPUs, by layout and layer spec, beside FSDP2's on them.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.megatron_layouts 0.6B 4B [--save]
        [--layers local transformer_engine] [--pack 16384]

`FSDP2` gathers the model once a step, and `FSDP2 by layers` each layer in every micro-batch. Stages
(pp) are without the distributed optimizer, which tied embeddings over several stages exclude. All
take the same steps, one after the other: 64 sequences of 128 + 896 tokens, split over the ranks
that have data of their own, in packs of up to `--pack` rows. At 4B, all recompute whole layers.
Times are medians on rank 0 of the host's clock around a step, with the GPU drained before and
after. Peak memory is that of the rank with the most. The log-probs of all are compared before the
first step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.megatron_step import LAYERS, PACKAGES, RECOMPUTE
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import VOCAB
from benchmarks.table import Row
from benchmarks.train_step import STEP_TOKENS, WARMUPS, step_seconds
from benchmarks.training import PACK_TOKENS, batch, config, learner, scored
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import TrainerConfig, fsdp2_settings
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.types.batch import Batch

LAYOUTS: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})
REPEATS = 5


@dataclass(frozen=True)
class Found:
    """What a step took, the most memory of a rank, and the log-probs before the first step."""

    seconds: float
    gibibytes: float
    logprobs: NDArray[np.float32]


def cases(name: str, options: argparse.Namespace, num_ranks: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each contender, its settings and its axes; FSDP2 is the first."""
    is_large = name == "4B"
    base = replace(config(name), max_tokens=options.pack)
    fsdp2 = replace(fsdp2_settings(base), recompute="all" if is_large else "none")
    yield "FSDP2", replace(base, backend=fsdp2), RoleSplit()
    if not is_large:
        by_layer = replace(fsdp2, wrap="layer")
        yield "FSDP2 by layers", replace(base, backend=by_layer), RoleSplit()
    for layers in options.layers:
        for axes in LAYOUTS:
            if num_ranks % prod(axes.values()) == 0:
                backend = MegatronConfig(
                    layers=layers,
                    sequence_parallel="tp" in axes,
                    distributed_optimizer="pp" not in axes,
                    model_options=RECOMPUTE if is_large else {},
                )
                named = " x ".join(f"{axis} {size}" for axis, size in axes.items())
                named = named or f"dp {num_ranks}"
                yield f"{layers} layers, {named}", replace(base, backend=backend), RoleSplit(**axes)


def measure(name: str, cfg: TrainerConfig, axes: RoleSplit, given: Batch, world: World) -> Found:
    """Return what a contender takes. Nothing of it is left on the GPUs. Ranks: all of the world."""
    one = learner(name, cfg, world, axes)
    context = one.context
    given = scored(one, given.shard(context.data_size)[context.data_rank])
    for _ in range(WARMUPS):
        step_seconds(one, given)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        dist.all_reduce(torch.zeros(1))  # the ranks begin together
        times.append(step_seconds(one, given))
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30)
    by_sequence = given.rollout_logprobs[given.mask].reshape(given.num_sequences, -1)
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, dict(zip(given.index.tolist(), by_sequence, strict=True)))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    del one
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    of_all = {index: row for part in parts for index, row in part.items()}
    whole = np.concatenate([of_all[index] for index in sorted(of_all)])
    return Found(statistics.median(times), float(peak), whole)


def rows_of(name: str, options: argparse.Namespace, world: World) -> Iterator[Row]:
    given = batch(STEP_TOKENS, VOCAB)
    ours: Found | None = None
    for contender, cfg, axes in cases(name, options, world.size):
        found = measure(name, cfg, axes, given, world)
        what = f"Qwen3-{name} on {world.size} GPUs, {contender}"
        if world.rank == 0:
            print(f"{what}: {found.seconds:.3f} s, {found.gibibytes:.1f} GiB", flush=True)
        if ours is None:
            ours = found
            yield measured(f"{what}: step", found.seconds, "s")
            yield measured(f"{what}: peak memory", found.gibibytes, "GiB")
            continue
        yield compared(f"{what}: step", found.seconds, "s", peer="FSDP2", peer_value=ours.seconds)
        yield compared(
            f"{what}: peak memory",
            found.gibibytes,
            "GiB",
            peer="FSDP2",
            peer_value=ours.gibibytes,
        )
        difference = np.abs(found.logprobs - ours.logprobs)
        yield measured(f"{what}: mean abs(dlogp) to FSDP2", float(difference.mean()), "")
        yield measured(f"{what}: largest abs(dlogp) to FSDP2", float(difference.max()), "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", choices=("0.6B", "4B"))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--pack", type=int, default=PACK_TOKENS, help="rows of a pack")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    world = World.from_env()
    rows = [row for name in options.shapes for row in rows_of(name, options, world)]
    code = 0
    if world.rank == 0:
        packages = [*PACKAGES, *(["transformer_engine"] if LAYERS[1] in options.layers else [])]
        facts = gpu()
        code = finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **facts)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
