"""What sleep costs a GRPO step of a trainer and an engine on one GPU.

- small: the shape of Qwen3-0.6B, 8 prompts with 2 samples of 192 tokens. Everything fits at once,
  so nothing sleeps. Beside it is an earlier commit, whose KV pages slept in every step.
- large: the shape of Qwen3-4B, 16 prompts with 8 samples of 768 tokens. All memory of both roles
  sleeps in turn (offload.sleep = always).

Each figure is a median over steps. The share of sleep, wake and push is what of a step passes in
these phases, and in a train step that waits for bytes which are copied in its background.

    python -m benchmarks.offload_step [--tar then.tar] [--quick] [--save] [small large]

The commit is bd9fb46, or that of a file of `git archive COMMIT spmd_rl examples`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside_commit import (
    COMMIT,
    GPU_TOKENIZER,
    NOW,
    ROOT,
    THEN,
    Side,
    roots,
    started,
)
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_folder
from benchmarks.table import Row

SMALL = ("--prompts_per_step=8", "--sampling.num_samples=2", "--sampling.max_tokens=192")
LARGE = ("--prompts_per_step=16", "--sampling.num_samples=8", "--sampling.max_tokens=768")
WARM_UP, SMALL_STEPS, LARGE_STEPS = 2, 20, 4
OVERHEAD = ("sleep", "wake", "sync")  # phases that generate nothing and learn nothing
RESTORE = "memory/restore_s"  # how long a train step waited for bytes
PARTS = ("small", "large")


def words_of(model: Path, *words: str) -> list[str]:
    return [
        "benchmarks.offload_recipe",
        f"--model={model}",
        "--data=examples/arithmetic/train.jsonl",
        "--reward=benchmarks.offload_recipe:reward",
        "--sampling.ignore_eos=true",
        "--steps=1000",
        *words,
    ]


class Laps:
    """The steps of one side: their seconds, phases and metrics."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.facts: list[dict[str, Any]] = []

    def add(self, reply: dict[str, Any]) -> None:
        self.seconds += reply["seconds"]
        self.facts.append(reply)

    def phase(self, name: str) -> float:
        """Return the median seconds of a phase; 0 where there was none."""
        return median(one["phases"].get(name, 0.0) for one in self.facts)

    def metric(self, name: str) -> float:
        return median(one["measured"].get(name, 0.0) for one in self.facts)

    def share(self) -> float:
        """Return the median share of a step that goes to sleep, wake and push."""
        return median(
            (
                sum(one["phases"].get(name, 0.0) for name in OVERHEAD)
                + one["measured"].get(RESTORE, 0.0)
            )
            / seconds
            for one, seconds in zip(self.facts, self.seconds, strict=True)
        )


def run(sides: dict[str, Side], num_steps: int) -> dict[str, Laps]:
    """Have all sides take steps in turn, after a warm-up."""
    laps = {name: Laps() for name in sides}
    for number in range(WARM_UP + num_steps):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            reply = sides[name].ask(laps=1)
            if number >= WARM_UP:
                laps[name].add(reply)
    return laps


def split_rows(what: str, laps: Laps) -> Iterator[Row]:
    """Yield where the time of a step goes."""
    for phase in (*OVERHEAD, "rollout", "train"):
        yield measured(f"{what}: {phase}", 1e3 * laps.phase(phase), "ms")


def small(folder: Path, tar: Path, quick: bool) -> tuple[list[Row], str]:
    """Return the rows of a step where everything fits, and the earlier commit."""
    write_folder("0.6B", folder / "small", GPU_TOKENIZER)
    (folder / THEN).mkdir()
    code, commit = roots(tar, folder)
    what = "0.6B, 8 x 2, 192 tokens"
    laps = {}
    for name, root in code.items():  # one after the other: each takes the whole GPU for its pages
        with started({name: root}, words_of(folder / "small", *SMALL), 1) as sides:
            laps |= run(sides, 3 if quick else SMALL_STEPS)
    now, then = laps[NOW], laps[THEN]
    rows = [
        compared(
            f"{what}: step",
            1e3 * median(now.seconds),
            "ms",
            peer="the earlier commit",
            peer_value=1e3 * median(then.seconds),
            at_most=0.67,
        ),
        measured(f"{what}: share of sleep, wake and push", now.share(), "", at_most=0.05),
        measured(f"{what}: the same share of the earlier commit", then.share(), ""),
        *split_rows(what, now),
        *split_rows(f"{what}, the earlier commit", then),
    ]
    return rows, commit


def large(folder: Path, quick: bool) -> list[Row]:
    """Return the rows of a step in which all memory of both roles sleeps in turn."""
    write_folder("4B", folder / "large", GPU_TOKENIZER)
    what = "4B, 16 x 8, 768 tokens, all asleep in turn"
    words = words_of(folder / "large", *LARGE, "--offload.sleep=always", "--engine.num_pages=1024")
    with started({NOW: ROOT}, words, 1) as sides:
        laps = run(sides, 1 if quick else LARGE_STEPS)[NOW]
    return [
        measured(f"{what}: step", median(laps.seconds), "s"),
        measured(f"{what}: share of sleep, wake and push", laps.share(), "", at_most=0.10),
        measured(f"{what}: wait for bytes within train", 1e3 * laps.metric(RESTORE), "ms"),
        measured(f"{what}: given back in a step", laps.metric("memory/slept_gib"), "GiB"),
        measured(f"{what}: copied in a step", laps.metric("memory/copied_gib"), "GiB"),
        measured(f"{what}: mismatched tokens", laps.metric("onpolicy/mismatched_tokens"), "tokens"),
        *split_rows(what, laps),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="small, large")
    parser.add_argument("--tar", type=Path, help="the earlier code, as git archive packs it")
    parser.add_argument("--quick", action="store_true", help="few steps of each")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    parts = options.parts or PARTS
    rows, facts = list[Row](), gpu()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, tar = Path(name), options.tar
        if "small" in parts:
            if tar is None:
                tar = folder / "then.tar"
                words = ["git", "archive", f"--output={tar}", COMMIT, "spmd_rl", "examples"]
                subprocess.run(words, cwd=ROOT, check=True)
            found, facts["the earlier commit"] = small(folder, tar, options.quick)
            rows += found
        if "large" in parts:
            rows += large(folder, options.quick)
    return finish(
        __file__,
        ("torch", "numpy", "torch_memory_saver"),
        rows,
        save=options.save,
        machine=gpu_machine(),
        **facts,
    )


if __name__ == "__main__":
    sys.exit(main())
