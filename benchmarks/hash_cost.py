"""Cost of the microscope: the engine's decode step with a hash of every row after every op.

The hashes are recorded in the engine's graphs. An engine with the shapes of Qwen3-0.6B and random
weights generates, and the same engine replays under a tap, in turns. The time of a step is the
median over steps that decode all sequences, measured on the host from one step to the next. Steps
are launched ahead of the GPU, so in steady decoding that is the time of a step. It includes the
scoring of the samples' tokens, which a replay does too. An engine without a tap has none of this.

    python -m benchmarks.hash_cost [--save]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_folder
from benchmarks.table import Row
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass, EngineReplay, requests, sized
from spmd_rl.microscope.replay.forward_pass import load_model
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.rollout.engine import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

BATCHES, PROMPT, ANSWER, TURNS = (1, 64, 256), 128, 128, 3
WARM = 24  # steps that record graphs, or follow such a step
DEVICE = torch.device("cuda")


def sequences(batch: int, vocab: int) -> ReplayCase:
    rng = np.random.default_rng(0)
    answers = (rng.integers(0, vocab, PROMPT + ANSWER).astype(np.int64) for _ in range(batch))
    return ReplayCase(
        tuple(ReplaySequence(f"{n}:0", one[:PROMPT], one[PROMPT:]) for n, one in enumerate(answers))
    )


def step_s(engine: NativeEngine, case: ReplayCase) -> float:
    """Return the seconds of a step that decodes all sequences."""
    for request in requests(case):
        engine.submit(request)
    times, began = [], time.perf_counter()
    while engine.has_work:
        progress, ended = engine.step(), time.perf_counter()
        if len(progress.tokens) == len(case.sequences):
            times.append(ended - began)
        began = ended
    return statistics.median(times[WARM:])


def plain_s(path: EnginePass, case: ReplayCase) -> float:
    engine = NativeEngine(path.model, sized(path, case), DEVICE)
    engine.sink().commit(0)
    return step_s(engine, case)


@torch.inference_mode()
def hashed_s(path: EnginePass, case: ReplayCase) -> tuple[float, int]:
    """Return the same for a replay with hashes, and the number of points of a decode step."""
    hashes = HashTap(case.num_rows)
    replay = EngineReplay(path, case, hashes)
    with replay.hooked():
        seconds = step_s(replay.engine, case)
    decoded = int(case.lengths[0]) - 2
    return seconds, sum(bool(one[decoded]) for one in hashes.table.values())


def measure(path: EnginePass, batch: int) -> Iterator[Row]:
    case = sequences(batch, path.model.spec.vocab_size)
    plain, hashed = [], []
    for _ in range(TURNS):
        plain.append(plain_s(path, case) * 1e3)
        seconds, num_points = hashed_s(path, case)
        hashed.append(seconds * 1e3)
    ours, peer = statistics.median(hashed), statistics.median(plain)
    name = f"Qwen3-0.6B, batch {batch}: decoding step of a replay"
    yield compared(
        f"{name}, every row hashed at {num_points} points",
        ours,
        "ms",
        peer="the engine",
        peer_value=peer,
    )
    yield measured(f"{name}, more for each point", (ours - peer) / num_points * 1e3, "us")


def main() -> int:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder("0.6B", folder)
        model = load_model(folder, torch.bfloat16, DEVICE)
    path = EnginePass(model, NativeEngineConfig(max_batch=max(BATCHES), max_step_tokens=8192))
    for batch in BATCHES:
        rows += measure(path, batch)
        print(*rows[-2:], sep="\n", flush=True)
    packages = ("torch", "triton", "flash-attn-4")
    return finish(
        __file__, packages, rows, save="--save" in sys.argv, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
