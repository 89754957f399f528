"""The ledger of `spmd-rl plan` compared with the memory that GPUs report, phase by phase.

It runs GRPO with the shape of Qwen3-0.6B and reads the memory after every phase (memory_recipe.py).
It measures what torch's allocator does not know of (contexts, communicators, graphs, KV pages), and
the peak of the allocator within the phase. The ledger is made from the same command line without a
GPU.

In `full`, the engine takes as many pages as the ledger leaves it, so the GPU is as full as it gets.

    python -m benchmarks.memory one [colocated split full] [--save]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.grpo_proof import TOKENIZER, write_prompts
from benchmarks.memory_recipe import FILE
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.config.load import load
from spmd_rl.offload.ledger import PHASES
from spmd_rl.plan.resolve import resolve
from spmd_rl.recipes.grpo import Config

PACKAGES = ("torch", "triton", "flash-attn-4")
RECIPE = "benchmarks.memory_recipe"
PAGES = "engine.num_pages=2048"
CASES = {
    "one": (1, [PAGES]),
    "colocated": (2, [PAGES]),
    "split": (2, [PAGES, "split.train.ranks=1", "split.infer.ranks=1"]),
    "full": (1, []),
}
# a program that prints the memory of an empty CUDA context, and that of the GPU
CONTEXT = (
    "import torch; torch.ones(1, device='cuda'); free, total = torch.cuda.mem_get_info(); "
    "print(total - free, total)"
)
ENOUGH = 0.95  # the least share of the measured bytes that the ledger must predict


def settings(folder: Path) -> list[str]:
    return [
        f"model={folder / '0.6B'}",
        f"data={folder / 'prompts.jsonl'}",
        "reward=benchmarks.proof_recipe:even",
        f"run.folder={folder}",
        "steps=2",
        "prompts_per_step=32",
        "sampling.num_samples=8",
        "sampling.max_tokens=384",
        "engine.dtype=bfloat16",
        "engine.max_batch=256",
        "engine.page_size=128",
        "engine.load_weights=false",
        "trainer.init=random",
        "trainer.dtype=bfloat16",
        "trainer.max_tokens=16384",
    ]


def read(name: str, folder: Path) -> list[tuple[str, list[dict[str, int]]]]:
    """Run a case, and return its moments, each with the readings of all ranks."""
    num_ranks, more = CASES[name]
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        RECIPE,
    ]
    words = [f"--{word}" for word in [*settings(folder), *more, f"run.name={name}"]]
    subprocess.run([*command, f"--nproc={num_ranks}", *words], check=True)
    found: list[tuple[str, list[dict[str, int]]]] = json.loads((folder / name / FILE).read_text())
    print(json.dumps(found), flush=True)
    return found


def measure(name: str, folder: Path, capacity_bytes: int) -> Iterator[Row]:
    readings = dict(read(name, folder))  # of each phase, the last
    num_ranks, more = CASES[name]
    plan = resolve(load(Config, None, [*settings(folder), *more]), num_ranks, capacity_bytes)

    for rank in range(num_ranks):
        for phase in PHASES:
            predicted = plan.ledgers[rank].resident_bytes(phase) / 2**30
            one = readings[phase][rank]
            found = (one["outside_bytes"] + one["peak_bytes"]) / 2**30
            what = f"{name}, rank {rank}, {phase}: ledger"
            yield compared(
                what, predicted, "GiB", peer="measured", peer_value=found, at_least=ENOUGH
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    context, capacity_bytes = map(
        int, subprocess.check_output([sys.executable, "-c", CONTEXT], text=True).split()
    )
    rows: list[Row] = [measured("a context", context / 2**20, "MiB")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config("0.6B", folder / "0.6B", TOKENIZER)
        write_prompts(folder / "prompts.jsonl", 64)
        for case in options.cases:
            rows += measure(case, folder, capacity_bytes)
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
