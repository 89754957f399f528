"""Decode step of engines whose ranks share a model, beside SGLang's and beside the floor of bytes.

SGLang has as many ranks and its own all-reduce, whose bits it does not promise. engines.py says how
else both run, and engine_vs_sglang.py how a step is timed. Weights are random, and SGLang's are its
dummies. The floor is what `spmd-rl plan` counts: bytes, operations, and the latency of sums.

With an engine a GPU, each rank reads all weights for its own sequences. The last rows of a shape
compare a step of that with one of ranks that share the model, and have the sequences of all.

    python -m benchmarks.shared_decode [32B 8B] [--tp 2] [--sglang SITE] [--attention triton]
        [--save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_vs_sglang import run, step_ms
from benchmarks.engines import PACKAGES, PAGE_SIZE, Pair, start, versions
from benchmarks.peer import Peer
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.sglang_cli import ROOMS
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.model.read import read_spec
from spmd_rl.plan.decode_floor import decode_work, gpu_of
from spmd_rl.rollout.native.config import NativeEngineConfig

LENGTHS, REPEATS = (32, 160), 3
SGLANG_BAR, FLOOR_BAR, ALONE_BAR = 0.9, 1.25, 0.75


@dataclass(frozen=True)
class Shape:
    """What is measured of a shape: sequences of an engine and the tokens of their prompts, and the
    same of each GPU where an engine a GPU is compared.
    """

    cases: tuple[tuple[int, int], ...]
    kv_tokens: int
    of_each_gpu: tuple[tuple[int, int], ...] = ()


SHAPES = {
    "0.6B": Shape(((1, 128), (16, 128)), 32 << 10, ((8, 128),)),
    "8B": Shape(((1, 4096), (32, 4096), (64, 4096)), 300 << 10, ((4, 4096), (32, 4096))),
    "32B": Shape(((1, 128), (16, 128)), 32 << 10),
}


def settings_of(shape: Shape) -> dict[str, dict[str, Any]]:
    """Return the settings of ours and of SGLang that give both the same room."""
    most = max(batch for batch, _ in shape.cases)
    return {
        "ours": {"num_pages": shape.kv_tokens // PAGE_SIZE, "max_batch": 2 * most},
        "sglang": {
            "load_format": "dummy",
            "max_total_tokens": shape.kv_tokens,
            "max_running_requests": most,
            "cuda_graph_max_bs_decode": most,
            "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # prefill is not timed
        },
    }


def floor_ms(folder: Path, tp: int, batch: int, prompt: int) -> float:
    cfg = NativeEngineConfig(dtype="bfloat16", page_size=PAGE_SIZE)
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    work = decode_work(read_spec(folder), cfg, tp, 1)
    return 1e3 * work.time(gpu_of(gpu_bytes), batch, prompt + sum(LENGTHS) / 2).seconds


def clock_ms(engine: Peer, batch: int, prompt: int) -> float:
    """Return the median time of a step in which all sequences run, by the engine's own clock."""
    run(engine, batch, prompt, LENGTHS[0])
    return 1e3 * run(engine, batch, prompt, LENGTHS[1])["step_s"]


def measure(name: str, ranks: Peer, sglang: Peer | None, tp: int, folder: Path) -> Iterator[Row]:
    for batch, prompt in SHAPES[name].cases:
        what = f"Qwen3-{name}, tp {tp}, batch {batch}, prompt {prompt}"
        if sglang is None:
            ours = clock_ms(ranks, batch, prompt)
        else:
            ours, theirs, clock = step_ms(Pair(ranks, sglang), batch, prompt, REPEATS, LENGTHS)
            yield compared(
                f"{what}: step", ours, "ms", peer="SGLang", peer_value=theirs, at_most=SGLANG_BAR
            )
            yield measured(f"{what}: our own clock around step", clock, "ms")
        floor = floor_ms(folder, tp, batch, prompt)
        print(f"{what}: {ours:.2f} ms, floor {floor:.2f} ms", flush=True)
        yield compared(
            f"{what}: step and its floor",
            ours,
            "ms",
            peer="floor",
            peer_value=floor,
            at_most=FLOOR_BAR,
        )


def rows_of(name: str, tp: int, options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    shape = SHAPES[name]
    settings, found = settings_of(shape), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder_name, ExitStack() as stack:
        folder = Path(folder_name)
        write_config(name, folder)
        sglang = None
        if options.sglang:
            theirs = settings["sglang"] | {"tp_size": tp, "attention_backend": options.attention}
            sglang = stack.enter_context(start("sglang", folder, options.sglang, theirs))
            found = versions(sglang)
            print(found, flush=True)
        ranks = stack.enter_context(start("ours", folder, settings=settings["ours"], tp=tp))
        rows = list(measure(name, ranks, sglang, tp, folder))
        if shape.of_each_gpu:
            alone = stack.enter_context(start("ours", folder, settings=settings["ours"]))
        for batch, prompt in shape.of_each_gpu:
            own, shared = clock_ms(alone, batch, prompt), clock_ms(ranks, tp * batch, prompt)
            what = f"Qwen3-{name}, {batch} sequences of {prompt} tokens a GPU: step with tp {tp}"
            print(f"{what}: {shared:.2f} ms, {own:.2f} with an engine a GPU", flush=True)
            rows.append(
                compared(what, shared, "ms", peer="tp 1", peer_value=own, at_most=ALONE_BAR)
            )
    return rows, found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["32B", "8B"])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--sglang", default="", metavar="SITE")
    parser.add_argument("--attention", default="fa3", help="SGLang's attention_backend")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        of_shape, found = rows_of(name, options.tp, options)
        rows += of_shape
    facts = gpu() | found
    return finish(
        __file__,
        PACKAGES,
        rows,
        save=options.save,
        rooms=ROOMS,
        machine=gpu_machine(),
        **facts,
    )


if __name__ == "__main__":
    sys.exit(main())
