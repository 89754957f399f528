"""GRPO on the arithmetic example, with SGLang and with the native engine: what each learns.

    python -m benchmarks.sglang_learning --python /tmp/sgl [--seeds 0 1 2] [--save]

The runs of an engine share one GPU and take place at once, so no time is reported. Each run has
room for few tokens of keys and values, so that no run counts on memory that another one takes. The
model is that of examples/arithmetic/gpu.toml with one layer more, 27M parameters. Runs of one seed
differ in the engine alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ran_files import A_RUN
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.rollout.sglang.options import ask_site

PACKAGES = ("torch", "transformers", "triton")
EXAMPLE = Path("examples/arithmetic")
KV_TOKENS, PAGE_TOKENS = 131072, 128
LAST = 20  # steps that the reward is averaged over
BAR = 0.03  # between the rewards of the two engines
RUN = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"


def write_model(folder: Path) -> Path:
    """Write the example's model with one layer more; it has no weights."""
    source = EXAMPLE / "model-20m"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_words(kind: str, python: str) -> list[str]:
    if kind == "native":
        return [
            f"--engine.num_pages={KV_TOKENS // PAGE_TOKENS}",
            f"--engine.page_size={PAGE_TOKENS}",
        ]
    return [
        "--engine.kind=sglang",
        f"--engine.python={python}",
        "--engine.options.attention_backend=triton",
        "--engine.options.cuda_graph_max_bs_decode=64",
        "--engine.max_batch=512",
        f"--engine.options.max_total_tokens={KV_TOKENS}",
    ]


def start(kind: str, seed: int, options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    words = [
        "run",
        str(EXAMPLE / "recipe.py"),
        f"--config={EXAMPLE / 'gpu.toml'}",
        f"--model={folder / 'model'}",
        f"--steps={options.steps}",
        "--nproc=1",
        f"--run.folder={folder}",
        f"--run.name={kind}-{seed}",
        f"--run.seed={seed}",
        "--run.exact=false",
        *engine_words(kind, options.python),
    ]
    with open(folder / f"{kind}-{seed}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, *words], stdout=log, stderr=log, text=True
        )


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def last_reward(steps: list[dict[str, Any]]) -> float:
    return statistics.mean(step["reward/mean"] for step in steps[-LAST:])


def rows_of(folder: Path, seeds: list[int]) -> Iterator[Row]:
    distances, rewards = [], {}
    for seed in seeds:
        native, sglang = (steps_of(folder, f"{kind}-{seed}") for kind in ("native", "sglang"))
        rewards[seed] = last_reward(sglang), last_reward(native)
        yield compared(
            f"seed {seed}: mean reward of the last {LAST} of {len(sglang)} steps with SGLang",
            rewards[seed][0],
            "",
            peer="native engine",
            peer_value=rewards[seed][1],
        )
        yield measured(f"seed {seed}: reward of the first step", sglang[0]["reward/mean"], "")
        means = [step["onpolicy/mean_abs_dlogp"] for step in sglang]
        largest = [step["onpolicy/max_abs_dlogp"] for step in sglang]
        yield measured(f"seed {seed}: mean abs(dlogp), SGLang", statistics.mean(means), "nats")
        yield measured(f"seed {seed}: largest abs(dlogp), SGLang", max(largest), "nats")
        unequal = sum(step["onpolicy/mismatched_tokens"] for step in native)
        yield measured(f"seed {seed}: unequal tokens, native", unequal, "tokens", at_most=0)
        distances.append(abs(rewards[seed][0] - rewards[seed][1]))
    yield measured("largest distance between the two rewards", max(distances), "", at_most=BAR)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="", help="as engine.python")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        codes: dict[tuple[str, int], int] = {}
        for kind in ("native", "sglang"):
            runs = {(kind, seed): start(kind, seed, options, folder) for seed in options.seeds}
            codes |= {run: process.wait() for run, process in runs.items()}
        for (kind, seed), code in codes.items():
            if code:
                print((folder / f"{kind}-{seed}.log").read_text()[-2000:], file=sys.stderr)
        if any(codes.values()):
            return 1
        rows = list(rows_of(folder, options.seeds))
    versions = {"sglang": ask_site(options.python).version, **gpu()}
    return finish(
        __file__, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=gpu_machine(), **versions
    )


if __name__ == "__main__":
    sys.exit(main())
