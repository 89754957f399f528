"""Decoding beside a reward that sleeps: every tenth sample takes its grader five seconds.

A rank draws the same samples in turns (slow_reward_recipe.py): without a reward, with one that
returns at once, and with the one that sleeps. All requests of a turn are sent at once and have
unequal lengths, so that samples are graded while others decode. The rate is that of the tokens from
the first request to the last token. Values are medians over turns, after one of each kind that
starts the graders' processes. Each graded sample is noted in a file.

There are two kinds of reward: an async function in the processes that a rank has by default, and a
plain one that blocks its process, of which there are then eight. On a CPU the model has 4 million
parameters and random weights, on a GPU the shape of Qwen3-0.6B.

    python -m benchmarks.slow_reward [--quick] [--save] [async plain]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.grpo_step.work import SIZES, write_model
from benchmarks.record import MACHINE, compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_folder
from benchmarks.slow_reward_recipe import ASYNC, FILE, GRADED, GRADINGS, PLAIN, Drawn, Grading, Turn
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
BAR = 0.95  # of the rate without
KINDS = {"async": [f"--reward={ASYNC}"], "plain": [f"--reward={PLAIN}", "--hooks.processes=8"]}
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
    "benchmarks.slow_reward_recipe",
    "--nproc=1",
]
GPU_TOKENIZER = ROOT / "examples/arithmetic/model-20m"
GPU_WORDS = [
    "--samples=320",
    "--prompt_tokens=64",
    "--shortest=128",
    "--longest=1024",
    "--engine.max_batch=128",
    "--engine.num_pages=1500",
]
CPU_TURNS, GPU_TURNS = 3, 2


@dataclass(frozen=True)
class Measured:
    """The turns of a run, and how often each sample was graded, by the number of its prompt."""

    turns: list[Turn]
    graded: Counter[int]
    num_gradings: int  # that there should be, each of another sample


def run(kind: str, model: Path, folder: Path, words: list[str]) -> Measured:
    words = [f"--model={model}", f"--run.folder={folder}", f"--run.name={kind}", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*COMMAND, *KINDS[kind], *words], cwd=ROOT, check=True, env=environment)
    told = json.loads((folder / kind / FILE).read_text())
    turns = [_turn(**one) for one in told["turns"]]
    graded = Counter(map(int, (folder / kind / GRADED).read_text().split()))
    return Measured(turns, graded, told["num_graded"])


def _turn(drawn: dict[str, float], **rest: float) -> Turn:
    return Turn(drawn=Drawn(**drawn), **rest)


def rows_of(what: str, found: Measured) -> Iterator[Row]:
    drawn: dict[Grading, list[Drawn]] = {
        one: [turn.drawn for turn in found.turns if turn.grading == one] for one in GRADINGS
    }
    rate = {one: median(each.num_tokens / each.seconds for each in drawn[one]) for one in GRADINGS}
    used = {
        one: 1e6 * median(each.processor_s / each.num_tokens for each in drawn[one])
        for one in GRADINGS
    }
    for peer, words in (("none", "no reward"), ("fast", "one that returns at once")):
        yield compared(
            f"{what}: decoding beside a reward that sleeps",
            rate["slow"],
            "tokens/s",
            peer=words,
            peer_value=rate[peer],
            at_least=BAR,
        )
    yield compared(
        f"{what}: the rank's processor time for a token beside a reward that sleeps",
        used["slow"],
        "us",
        peer="no reward",
        peer_value=used["none"],
    )
    gap = {one: 1e3 * median(each.gap_s for each in drawn[one]) for one in GRADINGS}
    yield compared(
        f"{what}: longest time between two steps with tokens",
        gap["slow"],
        "ms",
        peer="no reward",
        peer_value=gap["none"],
    )
    whole = median(turn.whole_s for turn in found.turns if turn.grading == "slow")
    yield measured(f"{what}: until the last sample is graded by the one that sleeps", whole, "s")
    once = [count == 1 for count in found.graded.values()]
    missing = [False] * (found.num_gradings - len(once))
    yield counted(f"{what}: samples graded exactly once", once + missing)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="of the reward: async, plain")
    parser.add_argument("--quick", action="store_true", help="one turn of each, short sleeps")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    on_gpu, rows = torch.cuda.is_available(), []
    turns = 1 if options.quick else GPU_TURNS if on_gpu else CPU_TURNS
    words = [f"--turns={turns}", *(GPU_WORDS if on_gpu else [])]
    words += ["--sleep_s=0.5"] if options.quick else []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if on_gpu:
            write_folder("0.6B", folder / "model", GPU_TOKENIZER)
        else:
            write_model(SIZES[-1], folder)
        model = "Qwen3-0.6B" if on_gpu else f"{SIZES[-1].millions}M parameters"
        for kind in options.kinds or KINDS:
            found = run(kind, folder / "model", folder, words)
            rows += rows_of(f"{model}, {kind} reward", found)
    versions = gpu() if on_gpu else {}
    machine = gpu_machine() if on_gpu else MACHINE
    packages = ("torch", "transformers", "numpy")
    return finish(__file__, packages, rows, save=options.save, machine=machine, **versions)


if __name__ == "__main__":
    sys.exit(main())
