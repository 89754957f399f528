"""Full fine-tuning of a model larger than a GPU's memory: GRPO of an 8B shape on one GPU.

Weights, gradients and moments of 8.2 billion parameters take 131 GB in float32, on a GPU of 80 or
141 GB, which generates too. Master weights and moments are in host memory
(`trainer.backend.offload = "master"`), and trainer and engine sleep in turn. The script prints what
the plan says of each point of a step, and runs two steps of the recipe `grpo` (large_recipe.py)
with random weights.

Bars: no token's log-prob differs between engine and trainer, and the pages of keys and values take
at least 85 % of the memory that the trainer gives back. That is what the GPU holds at the end of a
train step, less what stays while the engine generates.

    python -m benchmarks.large_model [--model 8B] [--set trainer.backend.offload=moments] [--save]

It takes 100 GiB of host memory and, on an H100, some minutes. The first weights are drawn on the
host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.grpo_proof import TOKENIZER, write_prompts
from benchmarks.large_recipe import KV, USED
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import QWEN3, write_config
from benchmarks.table import Row
from spmd_rl.config.load import load
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.model.spec import ModelSpec
from spmd_rl.recipes.grpo import Config
from spmd_rl.train.cost.memory import step_sizes
from spmd_rl.train.cost.step_memory import step_points, table

PACKAGES = ("torch", "triton", "flash-attn-4", "torch_memory_saver")
RECIPE = "benchmarks.large_recipe"
BF16_BYTES = 2
PHASES = ("sync", "rollout", "train")
SHARE_OF_PAGES = 0.85
MAX_SECONDS = 9 * 60


def settings(name: str, folder: Path) -> list[str]:
    return [
        f"model={folder / name}",
        f"data={folder / 'prompts.jsonl'}",
        "reward=benchmarks.proof_recipe:even",
        f"run.folder={folder}",
        "run.name=large",
        "steps=2",
        "prompts_per_step=16",
        "offload.sleep=always",
        "sampling.num_samples=8",
        "sampling.max_tokens=384",
        "sampling.ignore_eos=true",
        "engine.load_weights=false",
        "engine.max_batch=128",
        "engine.memory_fraction=0.95",
        "trainer.init=random",
        "trainer.dtype=bfloat16",
        "trainer.lr=1e-5",
        "trainer.max_tokens=16384",
        "trainer.backend.recompute=all",
        "trainer.backend.offload=master",
        "trainer.backend.offload_activations=true",
    ]


def print_budget(name: str, words: list[str], spec: ModelSpec) -> None:
    trainer = load(Config, None, words).trainer
    placement = plan_split({"train": RoleSplit()}, 1)["train"]
    print(f"Qwen3-{name}: memory of the trainer at each point of a step")
    points = step_points(step_sizes(spec, trainer, placement), trainer.backend.offload)
    print("\n".join(table(points)), flush=True)


def run(words: list[str]) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        RECIPE,
        "--nproc=1",
    ]
    subprocess.run([*command, *(f"--{word}" for word in words)], check=True)


def measure(name: str, folder: Path, more: list[str]) -> Iterator[Row]:
    spec = write_config(name, folder / name, TOKENIZER)
    write_prompts(folder / "prompts.jsonl", 64)
    words = [*settings(name, folder), *more]
    print_budget(name, words, spec)
    began = time.monotonic()
    run(words)
    seconds = time.monotonic() - began
    lines = (folder / "large" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    what = f"Qwen3-{name}, {len(steps)} steps"
    compared = sum(step["onpolicy/compared_tokens"] for step in steps)
    unequal = sum(step["onpolicy/mismatched_tokens"] for step in steps)
    yield measured(f"{what}: compared tokens", compared, "tokens", at_least=1)
    yield measured(f"{what}: unequal tokens", unequal, "tokens", at_most=0)
    yield from memory_rows(what, steps[-1], BF16_BYTES * spec.num_parameters)
    for part in ("step", "sync", "sleep", "wake", "rollout", "train"):
        if f"time/{part}" in steps[-1]:
            yield measured(f"{what}: {part}, last step", steps[-1][f"time/{part}"], "s")
    yield measured(f"{what}: start to end", seconds, "s", at_most=MAX_SECONDS)


def memory_rows(what: str, step: dict[str, float], weight_bytes: int) -> Iterator[Row]:
    used = {phase: step[USED.format(phase)] for phase in PHASES}
    for phase in PHASES:
        yield measured(f"{what}: GPU memory in use, {phase}", used[phase] / 2**30, "GiB")
    stays = used["rollout"] - step[KV] - weight_bytes
    given_back = used["train"] - stays
    yield measured(f"{what}: memory that stays in all phases", stays / 2**30, "GiB")
    yield measured(f"{what}: memory that the trainer gives back", given_back / 2**30, "GiB")
    yield measured(f"{what}: pages of keys and values", step[KV] / 2**30, "GiB")
    share = step[KV] / given_back
    yield measured(f"{what}: pages of what is given back", share, "", at_least=SHARE_OF_PAGES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=QWEN3, default="8B")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="more")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="large-") as folder:
        rows = list(measure(options.model, Path(folder), options.more))
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
