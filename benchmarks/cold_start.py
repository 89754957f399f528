"""Seconds of the first step of a GRPO run: on a fresh machine, and started again on it.

The run is that of the recipe `grpo` (proof_recipe.py) with the shape of Qwen3-0.6B, on one GPU. It
is started twice in fresh processes. The first start finds no cache of compiled kernels; the second
finds what the first left. Both are sampled (stack_sampler.py), and the report says where the time
of each step goes.

    python -m benchmarks.cold_start [--save] [--json FILE] [--starts 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_proof import PACKAGES, RECIPE, STOP_IDS, TOKENIZER, write_prompts
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_folder
from benchmarks.table import Row

MODEL = "0.6B"
STEPS, PROMPTS, SAMPLES, NEW_TOKENS = 4, 32, 8, 256
BAR_S = 8.0
NAMES = ("fresh machine", "second start", "third start", "fourth start")
# Settings of the caches that would lead past the home folder of a start.
CACHE_SETTINGS = (
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "SPMD_RL_CACHE_DIR",
    "XDG_CACHE_HOME",
    "CUDA_CACHE_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)
SHOWN_S = 0.15  # frames with less are left out of the tree
# The innermost frame that a rule names decides where a sample counts: (part of the frame, name).
IMPORT = "<frozen importlib"  # frames of Python's import system
RULES = (
    (IMPORT, "imports"),
    ("load_module", "CuTe: load from disk"),
    ("cutlass/base_dsl/", "CuTe: compile"),
    ("cutlass/cutlass_dsl/", "CuTe: compile"),
    ("cutlass/cute/", "CuTe: compile"),
    ("cute_cache.py", "CuTe: cache"),
    ("flash_attn/cute/", "FlashAttention-4: host code"),
    ("triton/compiler/", "Triton: compile"),
    ("triton/backends/", "Triton: compile"),
    ("triton/runtime/build.py", "Triton: compile"),
    ("triton/", "Triton: look up and load"),
    ("cublas.py:has_reference_bits", "cuBLAS: compare bits"),
    ("cublas.py:fastest", "cuBLAS: time"),
    ("cublaslt.py:propose", "cuBLAS: propose"),
    ("cuda_graph.py:capture", "graphs: capture"),
    ("decode_graphs.py:_record", "graphs: warm-up of decode"),
    ("prefill_graphs.py:_record", "graphs: warm-up of prefill"),
    ("stop_checker.py", "engine: stop strings"),
    ("rollout/native/", "engine: other"),
    ("_engine_run_backward", "train: backward"),
    ("torch/optim/", "train: optimizer"),
    ("train/fsdp2/backend.py", "train: forward and FSDP2"),
    ("train/", "train: other"),
    ("weights/", "weights: push"),
    ("model/", "model: load or forward"),
    ("controller/worker.py", "worker: waits for the controller"),
)
OTHER = "other"


def options_of(folder: Path, name: str) -> list[str]:
    return [
        f"--model={folder / 'model'}",
        f"--data={folder / 'prompts.jsonl'}",
        f"--reward={RECIPE}:even",
        f"--run.folder={folder}",
        f"--run.name={name}",
        f"--steps={STEPS}",
        f"--prompts_per_step={PROMPTS}",
        f"--sampling.num_samples={SAMPLES}",
        f"--sampling.max_tokens={NEW_TOKENS}",
        f"--sampling.stop_ids={list(range(1000, 1000 + STOP_IDS))}",
        "--trainer.lr=1e-5",
    ]


class Start:
    """One run in fresh processes: its steps, and the stacks of its rank."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = NAMES[number]
        stacks = folder / f"stacks-{number}"
        stacks.mkdir()
        home = folder / "home"
        home.mkdir(exist_ok=True)
        environment = {key: os.environ[key] for key in os.environ if key not in CACHE_SETTINGS}
        command = [sys.executable, "-m", "benchmarks.stack_sampler", str(stacks), "run", RECIPE]
        self.began = time.time()
        subprocess.run(
            [*command, "--nproc=1", *options_of(folder, f"run-{number}")],
            check=True,
            env=environment | {"HOME": str(home)},
        )
        self.seconds = time.time() - self.began
        metrics = (folder / f"run-{number}" / "metrics.jsonl").read_text()
        self.steps = [json.loads(line) for line in metrics.splitlines()]
        self.samples = _samples(stacks)

    def step_s(self, index: int) -> float:
        return float(self.steps[index]["time/step"])

    def intervals(self) -> Iterator[tuple[str, float, float]]:
        begin = self.began
        end = self.steps[0]["unix_s"] - self.step_s(0)
        yield "before step 1", begin, end
        for index, step in enumerate(self.steps):
            yield f"step {index + 1}", step["unix_s"] - self.step_s(index), step["unix_s"]

    def within(self, begin: float, end: float) -> list[tuple[list[str], float]]:
        """Return the stacks between two times with their seconds."""
        return [(stack, weight) for at, weight, stack in self.samples if begin < at <= end]


def _samples(folder: Path) -> list[tuple[float, float, list[str]]]:
    """Return (time, seconds, stack) of the launcher, until it forks the rank, and of the rank."""
    processes = []
    for path in folder.glob("stacks-*.json"):
        content = json.loads(path.read_text())
        stacks, samples = content["stacks"], content["samples"]
        processes.append([(at, weight, stacks[number]) for at, weight, number in samples])
    launcher, rank = sorted(processes)
    return [one for one in launcher if one[0] < rank[0][0]] + rank


def category(stack: Sequence[str]) -> str:
    for frame in reversed(stack):
        for part, name in RULES:
            if part in frame:
                attention = any("flash_attn/cute/interface" in one for one in stack)
                return f"{name} (FlashAttention-4)" if name[:4] == "CuTe" and attention else name
    return OTHER


def by_category(found: Sequence[tuple[list[str], float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for stack, weight in found:
        total[category(stack)] += weight
    return dict(sorted(total.items(), key=lambda one: -one[1]))


def tree(
    found: Sequence[tuple[list[str], float]], depth: int = 0, indent: str = ""
) -> Iterator[str]:
    """Yield an indented line for each frame with its seconds.

    A frame that has all the seconds of its caller is left out, unless it calls nothing.
    """
    branches: dict[str, list[tuple[list[str], float]]] = defaultdict(list)
    for stack, weight in found:
        if len(stack) > depth:
            branches[stack[depth]].append((stack, weight))
    total = sum(weight for _, weight in found)
    for frame, inner in sorted(branches.items(), key=lambda one: -_seconds(one[1])):
        seconds = _seconds(inner)
        if seconds < SHOWN_S:
            continue
        is_shown = seconds < 0.98 * total or all(len(stack) == depth + 1 for stack, _ in inner)
        if is_shown:
            yield f"{indent}{seconds:7.2f}  {frame}"
        yield from tree(inner, depth + 1, indent + " " * is_shown)


def _seconds(found: Sequence[tuple[list[str], float]]) -> float:
    return sum(weight for _, weight in found)


def report(start: Start) -> dict[str, Any]:
    """Print and return where the seconds of a start went."""
    print(f"\n=== {start.name}: {start.seconds:.1f} s, steps", end=" ")
    print([round(start.step_s(index), 2) for index in range(STEPS)])
    kept: dict[str, Any] = {"seconds": start.seconds, "steps": start.steps, "where": {}}
    for name, begin, end in start.intervals():
        found = start.within(begin, end)
        where = by_category(found)
        kept["where"][name] = where
        print(f"\n--- {start.name}, {name}: {end - begin:.2f} s, sampled {_seconds(found):.2f} s")
        for what, seconds in where.items():
            if seconds >= SHOWN_S / 3:
                print(f"{seconds:7.2f}  {what}")
        if name in ("before step 1", "step 1"):
            print("tree:")
            plain = [([f for f in stack if IMPORT not in f], weight) for stack, weight in found]
            for line in tree(plain):
                print(line)
    for key, value in start.steps[0].items():
        if key.startswith(("before/", "time/")):
            print(f"{key} = {value}")
    return kept


def rows_of(start: Start) -> Iterator[Row]:
    bar = BAR_S if start.name != NAMES[0] else None
    first, third = start.step_s(0), start.step_s(2)
    yield measured(f"{start.name}: first step", first, "s")
    yield measured(f"{start.name}: third step", third, "s")
    yield measured(f"{start.name}: first step above the third", first - third, "s", at_most=bar)
    yield measured(f"{start.name}: before the first step", start.steps[0]["before/all"], "s")
    yield measured(f"{start.name}: start to end", start.seconds, "s")
    unequal = sum(step["onpolicy/mismatched_tokens"] for step in start.steps)
    yield measured(f"{start.name}: unequal tokens", unequal, "tokens", at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    kept = {}
    with tempfile.TemporaryDirectory(prefix="cold-start-") as name:
        folder = Path(name)
        write_folder(MODEL, folder / "model", TOKENIZER)
        write_prompts(folder / "prompts.jsonl", 512)
        for number in range(options.starts):
            start = Start(folder, number)
            kept[start.name] = report(start)
            rows += rows_of(start)
            caches = [path for path in (folder / "home").rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in caches)
            print(f"caches: {len(caches)} files, {size / 2**20:.1f} MiB", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(kept, indent=1))
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
