"""What the recipes beyond policy gradients learn on the arithmetic example, on a CPU.

For each seed a model imitates a careless teacher. From it DPO and a reward model learn from pairs,
RLHF from the reward model, rejection sampling from its own right answers, and a distilled student
from the model that this gives.

    python -m benchmarks.beyond_policies --seeds 0 1 2 --save
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import finish, measured
from benchmarks.table import Row

PACKAGES = ("torch", "numpy", "pyzmq", "msgspec")
EXAMPLES = Path("examples/recipes")
SPMD_RL = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
]
LAST = 5  # steps whose mean is the result of a run


class Runs:
    """The runs of one seed, in a folder of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed

    def model(self, name: str) -> str:
        """Return the model folder that a run wrote."""
        return str(self.folder / name / "hf")

    def run(self, recipe: str, *words: str, name: str = "") -> list[dict[str, Any]]:
        """Run the example of a recipe, and return the metrics of its steps."""
        name = name or recipe
        command = [
            *SPMD_RL,
            "run",
            recipe,
            f"--config={EXAMPLES / recipe}.toml",
            f"--run.folder={self.folder}",
            f"--run.name={name}",
            f"--run.seed={self.seed}",
            f"--prompts.seed={self.seed}",
            "--nproc=1",
        ]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for row in map(json.loads, lines) if row["step"] > 0]

    def right_answers(self, model: str, name: str) -> float:
        """Return the share of right answers of a model's samples."""
        rows = self.run("rejection_sampling", f"--model={model}", name=name)
        return fmean(row["reward/mean"] for row in rows)


def preferences(runs: Runs) -> Iterator[Row]:
    """Learn from pairs of answers. `runs` has the first model."""
    for recipe in ("dpo", "reward_model"):
        rows = runs.run(recipe, f"--model={runs.model('sft')}")
        accuracy = rows[-1]["eval/accuracy"]
        what = f"{recipe}, seed {runs.seed}: held-out pairs ranked right"
        yield measured(what, accuracy, "", at_least=0.8)


def own_samples(runs: Runs) -> Iterator[Row]:
    """Learn from the first model's samples, which the reward model or the reward function judges.

    `runs` has the first model and the reward model.
    """
    first, seed = runs.model("sft"), runs.seed
    before = runs.right_answers(first, "rejection_sampling")
    judge = runs.model("reward_model")
    runs.run("rlhf", f"--model={first}", f"--reward_model={judge}")
    gain = runs.right_answers(runs.model("rlhf"), "after_rlhf") - before
    yield measured(f"rlhf, seed {seed}: more right answers", gain, "", at_least=0.2)
    accepted = f"--data={runs.folder / 'rejection_sampling/sft.jsonl'}"
    settings = ("--steps=60", "--trainer.init=folder", "--trainer.lr=1e-3")
    constant = ("--trainer.schedule=constant", "--trainer.warmup_steps=0")
    runs.run("sft", f"--model={first}", accepted, *settings, *constant, name="teacher")
    gain = runs.right_answers(runs.model("teacher"), "after_sft") - before
    yield measured(f"rejection_sampling, seed {seed}: more right answers", gain, "", at_least=0.2)


def distillation(runs: Runs) -> Iterator[Row]:
    """Learn from the model that rejection sampling gave, in each form."""
    words = (f"--model={runs.model('sft')}", f"--teacher={runs.model('teacher')}")
    for form in ("sampled", "topk"):
        rows = runs.run("distill", *words, f"--form={form}", name=f"distill_{form}")
        divergences = [row["distill/kl"] for row in rows]
        left = fmean(divergences[-LAST:]) / fmean(divergences[:1])
        what = f"distill, {form}, seed {runs.seed}: share of the KL to the teacher that is left"
        yield measured(what, left, "", at_most=0.5)


def pretraining(runs: Runs) -> Iterator[Row]:
    """Learn plain text from random weights."""
    words = (f"--trainer.seed={runs.seed}", f"--documents.seed={runs.seed}")
    command = [*SPMD_RL, "run", "pretrain", f"--config={EXAMPLES / 'pretrain.toml'}"]
    where = (f"--run.folder={runs.folder}", "--run.name=pretrain", "--nproc=1")
    subprocess.run([*command, *where, *words], check=True, stdout=subprocess.DEVNULL)
    lines = (runs.folder / "pretrain/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]
    left = fmean(losses[-LAST:]) / losses[0]
    what = f"pretrain, seed {runs.seed}: share of the loss that is left"
    yield measured(what, left, "", at_most=0.5)


def rows_of_seed(folder: Path, seed: int) -> Iterator[Row]:
    """Run every recipe with one seed, each from what the ones before it wrote."""
    runs = Runs(folder / str(seed), seed)
    runs.run("sft", f"--trainer.seed={seed}")
    for part in (preferences, own_samples, distillation, pretraining):
        for row in part(runs):
            print(f"{row.what}: {row.value} {'' if row.holds else '(missed)'}", flush=True)
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--machine", default="laptop")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for seed in options.seeds for row in rows_of_seed(Path(folder), seed)]
    return finish(__file__, PACKAGES, rows, save=options.save, machine=options.machine)


if __name__ == "__main__":
    sys.exit(main())
