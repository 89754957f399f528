"""Time of fully asynchronous GRPO beside synchronous GRPO, where one prompt in eight has answers
that are 30 times as long as the others.

    python -m benchmarks.async_vs_sync --save

Both are whole runs of the shipped recipes on the same two CPU ranks: one trains, one generates. A
small model is first taught how long its answers are: prompts of one kind end after 4 tokens, and
those of the other are cut at 120. Both runs then learn from the same prompts, at a learning rate
that leaves the lengths alone. Their order is reversed from one repetition to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.record import compared, counted, finish, measured
from benchmarks.table import Row
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.observe.samples_file import read_groups

REPO = Path(__file__).parents[1]
MODEL = REPO / "examples/arithmetic/model"
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
]
SHORT_TOKENS, LONG_TOKENS = 4, 120
PROMPTS_PER_STEP, NUM_SAMPLES, NUM_STEPS = 8, 4, 24
MAX_LAG = 2
TAUGHT = ["sft", "--nproc=1", "--trainer.init=random", "--trainer.lr=3e-3", "--pairs_per_step=32"]
BOTH = [
    "--nproc=2",
    "--split.train.ranks=1",
    "--split.infer.ranks=1",
    f"--prompts_per_step={PROMPTS_PER_STEP}",
    f"--steps={NUM_STEPS}",
    f"--sampling.num_samples={NUM_SAMPLES}",
    f"--sampling.max_tokens={LONG_TOKENS}",
    "--prompts.shuffle=false",
    "--trainer.lr=1e-9",
    "--run.save_every=0",
]
RECIPES = {
    "synchronous": ["grpo"],
    "asynchronous": ["grpo_fully_async", f"--sampler.max_lag={MAX_LAG}"],
}


@dataclass(frozen=True)
class Measured:
    """A run: the seconds of all its steps, their oldest tokens, and its answers' lengths."""

    seconds: float
    lags: list[float]
    short: list[int]
    long: list[int]

    @classmethod
    def of(cls, folder: Path) -> Measured:
        rows = read_metrics(folder / "metrics.jsonl")
        groups = [group for row in rows for group in read_groups(folder, int(row["step"]))]
        lengths: dict[str, list[int]] = {"s": [], "l": []}
        for group in groups:
            lengths[group.prompt.text[0]] += [len(sample.tokens) for sample in group.samples]
        return cls(
            sum(row["time/step"] for row in rows),
            [row["version/lag_max"] for row in rows],
            lengths["s"],
            lengths["l"],
        )

    @property
    def num_samples(self) -> int:
        return len(self.short) + len(self.long)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = taught_model(folder), prompts(folder)
        runs: dict[str, list[Measured]] = {kind: [] for kind in RECIPES}
        for number in range(options.repetitions):
            for kind in list(RECIPES)[:: -1 if number % 2 else 1]:
                words = [*RECIPES[kind], *BOTH, f"--model={model}", f"--data={data}"]
                words.append(f"--reward={REPO / 'tests/system/even.py'}:even")
                runs[kind].append(Measured.of(run(folder, f"{kind}-{number}", words)))
                print(f"{kind}: {runs[kind][-1].seconds:.2f} s", flush=True)
    rows = rows_of(runs["synchronous"], runs["asynchronous"])
    return finish(__file__, ("torch", "pyzmq"), rows, save=options.save)


def rows_of(synchronous: list[Measured], asynchronous: list[Measured]) -> list[Row]:
    """Return the table of both kinds of runs."""
    everything = [*synchronous, *asynchronous]
    ratios = [sum(one.long) / len(one.long) / mean(one.short) for one in everything]
    lags = [lag for one in asynchronous for lag in one.lags]
    expected = NUM_STEPS * PROMPTS_PER_STEP * NUM_SAMPLES
    what = f"{NUM_STEPS} steps of fully asynchronous GRPO, 1 + 1 CPU ranks"
    return [
        compared(
            what,
            median(one.seconds for one in asynchronous),
            "s",
            peer="grpo",
            peer_value=median(one.seconds for one in synchronous),
            at_most=0.7,
        ),
        compared(
            f"{what}, least",
            min(one.seconds for one in asynchronous),
            "s",
            peer="grpo",
            peer_value=min(one.seconds for one in synchronous),
        ),
        measured("age of the oldest token", max(lags), "versions", at_most=MAX_LAG),
        measured("long answers beside short ones", min(ratios), "times as long", at_least=29),
        counted("runs with all samples", [one.num_samples == expected for one in everything]),
    ]


def mean(values: Iterable[int]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def taught_model(folder: Path) -> Path:
    """Return a model whose answers to "s..." are short, and to "l..." long."""
    base = folder / "base"
    base.mkdir()
    for path in MODEL.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    answers = {"s": "b" * (SHORT_TOKENS - 1), "l": "a" * (LONG_TOKENS + 20)}
    pairs = folder / "pairs.jsonl"
    pairs.write_text(lines({"prompt": text, "answer": answers[text[0]]} for text in texts(256)))
    words = [*TAUGHT, "--steps=150", f"--model={base}", f"--data={pairs}"]
    return run(folder, "taught", words) / "hf"


def prompts(folder: Path) -> Path:
    """Write the prompts of both recipes: the first of each step has long answers."""
    path = folder / "prompts.jsonl"
    path.write_text(
        lines({"prompt": text, "answer": ""} for text in texts(NUM_STEPS * PROMPTS_PER_STEP * 2))
    )
    return path


def texts(num_prompts: int) -> Iterable[str]:
    """Yield prompts of five characters, of which one in `PROMPTS_PER_STEP` is long."""
    for number in range(num_prompts):
        yield f"{'s' if number % PROMPTS_PER_STEP else 'l'}{number:03d}="


def lines(records: Iterable[dict[str, str]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def run(folder: Path, name: str, words: list[str]) -> Path:
    """Run a recipe to its end, and return the folder that it left."""
    places = [f"--run.folder={folder / 'runs'}", f"--run.name={name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    subprocess.run(
        [*COMMAND, *words, *places],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
    )
    return folder / "runs" / name


if __name__ == "__main__":
    sys.exit(main())
