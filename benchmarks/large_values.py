"""What large values cost between the controller and its workers.

`call` times an endpoint that takes an array of this size on each of two ranks, through the socket
and through shared memory, in turns. `step` counts what crosses in a step of GRPO, of GRPO with a
reference model and of PPO, in both directions: bytes in frames, and bytes written to shared memory.
All three generate equally many tokens.

    python -m benchmarks.large_values [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

import spmd_rl as rl
from benchmarks.ran_files import A_RUN
from benchmarks.record import compared, finish, measured
from benchmarks.table import Row
from spmd_rl.controller.channel.envelope import EnvelopeReader, EnvelopeWriter
from spmd_rl.controller.channel.shared_arrays import ControllerArrays
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.recipes import grpo

PACKAGES = ("torch", "pyzmq")
KIB = (256, 1024, 8192, 65536)  # to each rank
NUM_CALLS = {256: 60, 1024: 60, 8192: 12, 65536: 6}
STEPS = {
    "GRPO": [],
    "with a reference": ["--kl.coef=0.01"],
    "PPO": ["--algorithm=ppo", "--critic.init=random"],
}
MODEL, FILE = "examples/arithmetic/model", "large_values.json"
Measure = Literal["call", "step"]


@dataclass(frozen=True)
class Config(grpo.Config):
    measure: Measure = "step"


class Sink(rl.Role):
    """Takes arrays, and looks at one entry of each."""

    @rl.collective
    def take(self, arrays: rl.Sharded[list[NDArray[Any]]]) -> rl.Sharded[list[int]]:
        return [int(array[0]) for array in arrays]


def main(ctl: rl.Controller, cfg: Config) -> None:
    dispatcher = ctl._dispatcher
    found = calls(ctl, cfg, dispatcher) if cfg.measure == "call" else step(ctl, cfg, dispatcher)
    (ctl.run_folder / FILE).write_text(json.dumps(found))


def calls(ctl: rl.Controller, cfg: Config, dispatcher: Dispatcher) -> dict[str, list[float]]:
    """Return the milliseconds of a call by size, through the socket and through shared memory."""
    sink = ctl.spawn(Sink, cfg.trainer, on=ctl.world.split(cfg.split).train)
    shared, found = dispatcher.shared, dict[str, list[float]]()
    for kib in KIB:
        times: dict[bool, list[float]] = {True: [], False: []}
        arrays = [np.ones(kib << 10, np.uint8) for _ in range(ctl.world.size)]
        for turn in range(2 * NUM_CALLS[kib]):
            by_socket = turn % 2 == 0
            dispatcher.shared = None if by_socket else shared
            began = time.perf_counter()
            sink.take.call(arrays)
            times[by_socket].append((time.perf_counter() - began) * 1e3)
        found[str(kib)] = [statistics.median(times[by_socket]) for by_socket in (True, False)]
    dispatcher.shared = shared
    return found


def step(ctl: rl.Controller, cfg: Config, dispatcher: Dispatcher) -> dict[str, float]:
    """Return the bytes of one step after the first."""
    crossed = {"frames": 0, "files": 0}
    write, read, share = EnvelopeWriter.frame, EnvelopeReader.read, ControllerArrays.map
    write_file = ControllerArrays.write

    def counted_write(self: Any, *args: Any, **kwargs: Any) -> bytes:
        frame = write(self, *args, **kwargs)
        crossed["frames"] += len(frame)
        return frame

    def counted_read(self: Any, frame: bytes) -> Any:
        crossed["frames"] += len(frame)
        return read(self, frame)

    def counted_map(self: Any, name: str) -> Any:
        mapping = share(self, name)
        crossed["files"] += len(mapping)
        return mapping

    def counted_file(self: Any, pieces: Any, num_bytes: int) -> Any:
        crossed["files"] += num_bytes
        return write_file(self, pieces, num_bytes)

    run = rl.PolicyRun(ctl, cfg)
    for one in run.steps():
        with ctl.phase("sync"):
            run.weights.push(version=one.index)
        if one.index == 1:
            cast(Any, EnvelopeWriter).frame, cast(Any, EnvelopeReader).read = (
                counted_write,
                counted_read,
            )
            cast(Any, ControllerArrays).map = counted_map
            cast(Any, ControllerArrays).write = counted_file
        with ctl.phase("rollout"):
            groups = run.rollout.generate.call(run.prompts.take(cfg.prompts_per_step), cfg.sampling)
        with ctl.phase("train"):
            stats = run.update.step(groups, one.index)
        one.log(groups, stats)
    return {**crossed, "tokens": sum(len(one.tokens) for group in groups for one in group.samples)}


def run(measure: Measure, *words: str) -> Any:
    """Return what a run of this recipe on two ranks found."""
    settings = [
        *(
            f"--model={MODEL}",
            "--trainer.init=random",
            "--reward=spmd_rl.rewards.answers.match:exact",
        ),
        *("--data=examples/arithmetic/train.jsonl", "--prompts_per_step=64", "--steps=2"),
        *("--sampling.num_samples=16", "--sampling.max_tokens=256", "--sampling.ignore_eos=true"),
        *(f"--measure={measure}", *words),
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "spmd_rl", "run", "benchmarks.large_values", "--nproc=2"]
        subprocess.run(
            [*command, *settings, f"--run.folder={folder}", "--run.name=one"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads((Path(folder) / "one" / FILE).read_text())


def rows() -> list[Row]:
    found = [
        compared(
            f"call with {int(kib) // 1024 or 0.25:g} MiB to each of 2 ranks",
            by_file,
            "ms",
            peer="through the socket",
            peer_value=by_socket,
        )
        for kib, (by_socket, by_file) in run("call").items()
    ]
    steps = {name: run("step", *words) for name, words in STEPS.items()}
    alone = steps["GRPO"]
    for name, crossed in steps.items():
        assert crossed["tokens"] == alone["tokens"]
        found.append(measured(f"{name}: frames of a step", crossed["frames"] / 1024, "KiB"))
        found.append(
            compared(
                f"{name}: bytes of a step",
                (crossed["frames"] + crossed["files"]) / 1024,
                "KiB",
                peer="GRPO",
                peer_value=(alone["frames"] + alone["files"]) / 1024,
            )
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    sys.exit(finish(__file__, PACKAGES, rows(), save=parser.parse_args().save, rooms=A_RUN))
