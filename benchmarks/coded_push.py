"""Push of weights in few bits to the native engine of the trainer's process, beside bfloat16.

The trainer has the shape of Qwen3, on one GPU. A push rounds its float32 masters to codes. The
GPU's time is between CUDA events, behind other work. The whole time is that of the host, until the
GPU has done all. The formats come one after the other.

    python -m benchmarks.coded_push [0.6B 4B] [--weights e4m3 int4] [--save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.push import DEVICE, gpu_ms, host_ms, medians
from benchmarks.push_recipe import engine
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from benchmarks.training import config, learner
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_weights import coded_sizes
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.verification import Verifier

BYTES_BAR, TIME_BAR = {"e4m3": 0.51, "int4": 0.28}, 0.6


class Push(NamedTuple):
    """A push of one format. Units: bytes, milliseconds."""

    num_bytes: int
    coded_bytes: int  # of them, those of the weights that are in few bits in other formats
    on_gpu: float
    whole: float
    queued: float  # until the host has queued all
    compare: float
    num_equal: int
    num_unequal: int


def pushed(shape: str, folder: Path, weights: WeightFormat) -> Push:
    backend = learner(shape, replace(config(shape), weights=weights)).backend
    source, sink = backend.source(), engine(str(folder), DEVICE, weights=weights).sink()
    plan = plan_moves([source.layout(0)], [sink.layout(0)], None, 0)
    ends = LocalEnds(0, source, sink, DEVICE)
    moves = Executor(plan.moves, ends)
    verifier = Verifier(plan.moves, plan.replicas, ends)

    def push() -> None:
        source.open()
        moves.run(None)

    def whole() -> None:
        push()
        torch.cuda.synchronize()

    traffic = moves.run(None)
    proof = verifier.compare(None)
    works = {"whole": whole, "queued": push, "compare": lambda: verifier.compare(None)}
    on_host = medians(host_ms, works)
    spec = backend.scorer.model.spec
    num_coded, _ = coded_sizes(spec, "e4m3")
    plain_bytes = 2 * (spec.num_parameters - num_coded)
    return Push(
        traffic.copied_bytes,
        traffic.copied_bytes - plain_bytes,
        medians(gpu_ms, {"push": push})["push"],
        on_host["whole"],
        on_host["queued"],
        on_host["compare"],
        proof.num_equal,
        proof.num_unequal,
    )


def rows_of(shape: str, folder: Path, formats: list[WeightFormat]) -> Iterator[Row]:
    found: dict[WeightFormat, Push] = {}
    for weights in ("full", *formats):
        found[weights] = pushed(shape, folder, weights)
        torch.cuda.empty_cache()
        print(weights, found[weights], flush=True)
    for weights, one in found.items():
        what, usual = f"Qwen3-{shape}, push in {weights}", found["full"]
        yield measured(f"{what}: tensors that differ", one.num_unequal, "tensors", at_most=0)
        yield measured(f"{what}: tensors that are equal", one.num_equal, "tensors")
        bars = (BYTES_BAR[weights], TIME_BAR) if weights in BYTES_BAR else (None, None)
        for part, unit, value, peer, bar in (
            ("bytes", "bytes", one.num_bytes, usual.num_bytes, None),
            ("bytes of what is coded", "bytes", one.coded_bytes, usual.coded_bytes, bars[0]),
            ("GPU time", "ms", one.on_gpu, usual.on_gpu, None),
            ("time until the GPU has done all", "ms", one.whole, usual.whole, bars[1]),
            ("time to queue it", "ms", one.queued, usual.queued, None),
            ("time to compare both ends", "ms", one.compare, usual.compare, None),
        ):
            yield compared(
                f"{what}: {part}", value, unit, peer="bfloat16", peer_value=peer, at_most=bar
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["0.6B"])
    parser.add_argument("--weights", nargs="+", choices=list(BYTES_BAR), default=list(BYTES_BAR))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, Path(folder))
            rows += rows_of(shape, Path(folder), options.weights)
    packages = ("torch", "triton")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
