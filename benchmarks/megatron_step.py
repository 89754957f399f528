"""Training step of the Megatron-core backend beside FSDP2's, on one GPU, by layer spec.

FSDP2, Megatron-core with the local layers, and with transformer-engine's take the same steps, one
backend after the other: learner.train_step on 64 sequences of 128 + 896 tokens in packs of 16,384.
At 4B, moments are in host memory and all backends recompute whole layers. Values are medians of
the host's clock around a step, with the GPU drained before and after. MFU counts no recomputation
(spmd_rl/train/cost/flops.py). One more step of each is profiled, and says where the time goes. With
smaller packs, the same tokens take more launches: what a step then takes more is the host's time.

The log-probs of all backends are compared before the first step. Those of FSDP2 are the native
engine's, bit for bit.

    python -m benchmarks.megatron_step 0.6B 4B [--save] [--layers local transformer_engine]
        [--packs 16384 4096]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_time import gpu_time
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import VOCAB
from benchmarks.table import Row
from benchmarks.train_step import STEP_TOKENS, WARMUPS, step_seconds
from benchmarks.training import PACK_TOKENS, batch, config, learner, scored
from spmd_rl.train.config import TrainerConfig, fsdp2_settings
from spmd_rl.train.cost.flops import peak_flops
from spmd_rl.train.megatron.config import Layers, MegatronConfig
from spmd_rl.types.batch import Batch

LAYERS: tuple[Layers, ...] = ("local", "transformer_engine")
SPEED_BAR = 1.10
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PACKAGES = ("torch", "triton", "flash-attn-4", "megatron-core")


@dataclass(frozen=True)
class Found:
    """What a step of one backend took, and its log-probs of the batch's tokens before it."""

    seconds: float
    gibibytes: float
    mfu: float
    logprobs: NDArray[np.float32]
    seconds_of: dict[str, float]  # by what ran on the GPU (gpu_time.py)


def configs(name: str, layers: Sequence[Layers], pack: int) -> dict[str, TrainerConfig]:
    """Return the settings of each backend, which differ in nothing else."""
    fsdp2, is_large = replace(config(name), max_tokens=pack), name == "4B"
    if is_large:
        backend = replace(fsdp2_settings(fsdp2), offload="moments", recompute="all")
        fsdp2 = replace(fsdp2, backend=backend)
    found = {"FSDP2": fsdp2}
    for one in layers:
        backend = MegatronConfig(
            layers=one,
            offload="moments" if is_large else "none",
            model_options=RECOMPUTE if is_large else {},
        )
        found[f"Megatron-core, {one} layers"] = replace(fsdp2, backend=backend)
    return found


def measure(name: str, cfg: TrainerConfig, given: Batch, repeats: int) -> Found:
    """Return what a backend takes. Nothing of it is left on the GPU."""
    one = learner(name, cfg)
    given = scored(one, given)
    for _ in range(WARMUPS):
        step_seconds(one, given)
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step_seconds(one, given) for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated() / 2**30
    seconds_of = gpu_time(partial(step_seconds, one, given))
    flops = one.backend.flops(given.lengths, int(given.mask.sum())) / seconds
    most = peak_flops(one.backend.device, cfg.dtype)
    del one
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    logprobs = given.rollout_logprobs[given.mask]
    mfu = flops / most if most else float("nan")
    return Found(seconds, peak, mfu, logprobs, seconds_of)


def profile_rows(what: str, found: Found) -> Iterator[Row]:
    for kind, seconds in found.seconds_of.items():
        yield measured(f"{what}: {kind} in a profiled step", seconds, "s")


def rows_of(name: str, pack: int, options: argparse.Namespace) -> Iterator[Row]:
    shape = f"Qwen3-{name}" if pack == PACK_TOKENS else f"Qwen3-{name}, packs of {pack}"
    given = batch(STEP_TOKENS, VOCAB)
    found: dict[str, Found] = {}
    for backend, cfg in configs(name, options.layers, pack).items():
        found[backend] = measure(name, cfg, given, options.repeats)
        print(f"{shape} {backend}: {found[backend].seconds:.3f} s", flush=True)
    for backend, one in found.items():
        yield from profile_rows(f"{shape}, {backend}", one)
    ours = found.pop("FSDP2")
    yield measured(f"{shape}, FSDP2: MFU", ours.mfu, "")
    for backend, other in found.items():
        what, peer = f"{shape}, {backend}", "FSDP2"
        yield compared(
            f"{what}: step",
            other.seconds,
            "s",
            peer=peer,
            peer_value=ours.seconds,
            at_most=SPEED_BAR,
        )
        yield measured(f"{what}: MFU", other.mfu, "")
        yield compared(
            f"{what}: peak memory", other.gibibytes, "GiB", peer=peer, peer_value=ours.gibibytes
        )
        difference = np.abs(other.logprobs - ours.logprobs)
        yield measured(f"{what}: mean abs(dlogp)", float(difference.mean()), "")
        yield measured(f"{what}: largest abs(dlogp)", float(difference.max()), "")
        unequal = int((difference > 0).sum())
        yield measured(f"{what}: unequal of {len(difference):,} tokens", unequal, "tokens")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", choices=("0.6B", "4B"))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--packs", nargs="+", type=int, default=[PACK_TOKENS], help="rows of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cases = [(name, pack) for name in options.shapes for pack in options.packs]
    rows = [row for case in cases for row in rows_of(*case, options)]
    packages = [*PACKAGES, *(["transformer_engine"] if LAYERS[1] in options.layers else [])]
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
