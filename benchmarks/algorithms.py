"""Every algorithm on the arithmetic example, on this machine's CPU: does it learn.

    python -m benchmarks.algorithms [--only grpo ppo] [--seeds 0 1 2] [--save]

All start from one supervised warm-up, and take two optimizer steps for each rollout, so that ratios
are not 1. A seed is that of the samples. Each run must end at least 0.2 above the reward that it
began with. --save also draws docs/pictures/algorithms.png, which needs every algorithm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ran_files import A_RUN
from benchmarks.record import MACHINE, finish, measured
from benchmarks.table import Row
from spmd_rl.report.pictures.colours import NAMED

PACKAGES = ("torch", "transformers", "numpy")
EXAMPLE = Path("examples/arithmetic")
PICTURE = Path("docs/pictures/algorithms.png")
RUN = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"
NUM_LAST = 10  # steps that the last reward is the mean of
RISE = 0.2
COLUMNS = 5  # of the picture's panels
NUM_COLOURS = 64  # of the picture

# words beside --algorithm and the common ones, by the name of a variant
VARIANTS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [],
    "dapo": ["--overlong.buffer=1", "--mask_truncated=true"],
    "gspo": [],
    "cispo": [],
    "rloo": [],
    "reinforce_pp": ["--kl.coef=0.01"],
    "reinforce_pp_baseline": ["--kl.coef=0.01"],
    "ppo": ["--gae_lambda=0.95", "--critic.lr=3e-3", "--critic_warmup_steps=2"],
    "gdpo": [],
    "gigpo": [],
    "turn_returns": [],
    "grpo, KL in the loss": ["--kl.coef=0.02", "--kl.refresh_every=10"],
    "grpo, entropy bonus": ["--entropy_coef=0.002"],
    "grpo, MIS and OPSM": [
        "--correction.mode=mask",
        "--correction.level=geometric",
        "--correction.reject=sequence",
        "--opsm_delta=0.01",
    ],
}


def common_words(model: Path, steps: int) -> list[str]:
    """Return the words of every run."""
    return [
        f"--model={model}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        f"--reward={EXAMPLE / 'reward.py'}:in_parts",
        f"--steps={steps}",
        "--nproc=1",
        "--prompts_per_step=64",
        "--sampling.num_samples=8",
        "--sampling.max_tokens=4",
        "--trainer.lr=1e-3",
        "--trainer.betas=[0.9, 0.99]",
        "--trainer.minibatches=2",
        "--run.save_every=0",
    ]


def launch(recipe: str, words: list[str], folder: Path, name: str) -> Path:
    """Run a recipe to its end, and return the folder of the run."""
    command = [sys.executable, "-c", RUN, "run", recipe]
    with open(folder / f"{name}.log", "w") as log:
        code = subprocess.run(
            [*command, f"--run.folder={folder}", f"--run.name={name}", *words],
            stdout=log,
            stderr=log,
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"{name} failed:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    return folder / name


def warmed_up(folder: Path) -> Path:
    """Return the model after the demo's supervised steps, with which every run begins."""
    words = [f"--config={EXAMPLE / 'demo.toml'}", "--nproc=1", "--steps=0"]
    return launch(str(EXAMPLE / "recipe.py"), words, folder, "warm-up") / "hf"


def rewards_of(run: Path) -> list[float]:
    """Return the mean reward of each step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["reward/mean"] for row in rows if row["step"] > 0]


def rows_of(variant: str, curves: list[list[float]], seeds: list[int]) -> Iterator[Row]:
    """Yield the rows of one variant, whose curves are those of the seeds."""
    for seed, rewards in zip(seeds, curves, strict=True):
        last = statistics.mean(rewards[-NUM_LAST:])
        what = f"{variant}, seed {seed}"
        yield measured(f"{what}: reward of the first step", rewards[0], "")
        yield measured(f"{what}: rise by step {len(rewards)}", last - rewards[0], "", at_least=RISE)


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Draw a panel for each variant, with a line for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(2.5 * COLUMNS, 2.0 * down), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for number, (variant, lines) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(down, COLUMNS, number)
        steps = np.arange(1, 1 + max(map(len, lines)))
        axes.set_title(variant, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        for seed, (rewards, name) in enumerate(
            zip(lines, ("blue", "green", "violet"), strict=False)
        ):
            axes.plot(steps, rewards, color=NAMED[name].code, linewidth=1.2, label=f"seed {seed}")
        axes.set_ylim(-0.03, 1.03)
        if number == 1:
            axes.set_ylabel("reward", fontsize=8)
            axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=90)
    _reduce_colours(path)


def _reduce_colours(path: Path) -> None:
    """Keep the file below 100 KB."""
    from PIL import Image

    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(NUM_COLOURS)
    reduced.save(path, optimize=True)


def learn(options: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    """Run every chosen variant with every seed, and return their rewards by step."""
    model = warmed_up(folder)
    curves: dict[str, list[list[float]]] = {}
    for variant in options.only:
        algorithm = variant.partition(",")[0]
        words = [f"--algorithm={algorithm}", *VARIANTS[variant]]
        words += common_words(model, options.steps)
        began = time.monotonic()
        curves[variant] = [
            rewards_of(
                launch("grpo", [*words, f"--run.seed={seed}"], folder, _run_name(variant, seed))
            )
            for seed in options.seeds
        ]
        seconds = time.monotonic() - began
        print(
            f"{variant}: {seconds:.0f} s", *(f"{c[0]:.2f} -> {c[-1]:.2f}" for c in curves[variant])
        )
    return curves


def _run_name(variant: str, seed: int) -> str:
    return f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        curves = learn(options, Path(folder))
    rows = [row for name, lines in curves.items() for row in rows_of(name, lines, options.seeds)]
    if options.picture:
        draw(curves, Path(options.picture))
    elif options.save and len(curves) == len(VARIANTS):
        draw(curves, PICTURE)
    return finish(__file__, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=options.machine)


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--machine", default=MACHINE)
    parser.add_argument("--picture", default="", help="draw the curves into this file")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
