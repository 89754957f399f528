"""The ledger of `spmd-rl plan` compared with the memory that GPUs report, phase by phase.

It runs GRPO with the shapes of Qwen3 and reads the memory in every phase (memory_recipe.py). It
measures what torch's allocator does not know of (contexts, communicators, graphs, KV pages), and
the peak of the allocator within the phase. The ledger is made from the same command line without a
GPU. All answers are of one length, with which packs of tokens are full, as the ledger assumes.

In `one`, `4B` and `8B` both roles sleep in turn. In `full` the engine takes as many pages as the
ledger leaves it, and as little sleeps as the GPU has room for, so it is as full as it gets.
`4B` keeps moments in host memory, and `8B` the master weights too: about 92 GiB. Each case takes 1
to 3 minutes.

    python -m benchmarks.memory one 4B 8B [full colocated split] [--save]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grpo_proof import TOKENIZER
from benchmarks.memory_recipe import FILE
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.config.load import load
from spmd_rl.plan.resolve import resolve
from spmd_rl.recipes.grpo import Config

PACKAGES = ("torch", "triton", "flash-attn-4", "torch_memory_saver")
RECIPE = "benchmarks.memory_recipe"
PHASES = ("sync", "rollout", "train")
PAGES, ALWAYS = "engine.num_pages=2048", "offload.sleep=always"
PROMPT_TOKENS, ANSWER_TOKENS = 16, 496
LARGE = [
    ALWAYS,
    "engine.num_pages=512",
    "engine.max_batch=128",
    "prompts_per_step=16",
    "trainer.max_tokens=8192",
    "trainer.backend.recompute=all",
]


@dataclass(frozen=True)
class Case:
    """A shape of Qwen3, the number of ranks, and the settings besides those of all cases."""

    shape: str
    num_ranks: int
    words: list[str]


CASES = {
    "one": Case("0.6B", 1, [PAGES, ALWAYS]),
    "full": Case("0.6B", 1, []),
    "colocated": Case("0.6B", 2, [PAGES, ALWAYS]),
    "split": Case("0.6B", 2, [PAGES, "split.train.ranks=1", "split.infer.ranks=1"]),
    "4B": Case("4B", 1, [*LARGE, "trainer.backend.offload=moments"]),
    "8B": Case("8B", 1, [*LARGE, "trainer.backend.offload=master"]),
}
# a program that prints the memory of an empty CUDA context, and that of the GPU
CONTEXT = (
    "import torch; torch.ones(1, device='cuda'); free, total = torch.cuda.mem_get_info(); "
    "print(total - free, total)"
)
LEAST, MOST = 0.95, 1.05  # what the ledger predicts, over what was measured


def settings(name: str, folder: Path) -> list[str]:
    """Return the settings of a case; a later word replaces an earlier one."""
    case = CASES[name]
    words = [
        f"model={folder / 'models' / case.shape}",
        f"data={folder / 'prompts.jsonl'}",
        "reward=benchmarks.proof_recipe:even",
        f"run.folder={folder}",
        f"run.name={name}",
        "steps=2",
        "prompts_per_step=32",
        "sampling.num_samples=8",
        f"sampling.max_tokens={ANSWER_TOKENS}",
        "sampling.ignore_eos=true",
        "engine.dtype=bfloat16",
        "engine.max_batch=256",
        "engine.page_size=128",
        "engine.load_weights=false",
        "trainer.init=random",
        "trainer.dtype=bfloat16",
        "trainer.max_tokens=16384",
        *case.words,
    ]
    return [f"{key}={value}" for key, value in dict(one.split("=", 1) for one in words).items()]


def write_prompts(path: Path, count: int) -> None:
    """Write prompts of PROMPT_TOKENS characters, each of which is a token."""
    rng = random.Random(0)
    lines = ["".join(rng.choices("0123456789+", k=PROMPT_TOKENS - 1)) + "=" for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": line, "answer": ""}) + "\n" for line in lines))


def read(name: str, folder: Path) -> list[tuple[str, list[dict[str, int]]]]:
    """Run a case, and return its moments, each with the readings of all ranks."""
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        RECIPE,
    ]
    words = [f"--{word}" for word in settings(name, folder)]
    subprocess.run([*command, f"--nproc={CASES[name].num_ranks}", *words], check=True)
    found: list[tuple[str, list[dict[str, int]]]] = json.loads((folder / name / FILE).read_text())
    print(json.dumps(found), flush=True)
    return found


def measure(name: str, folder: Path, capacity_bytes: int) -> Iterator[Row]:
    case = CASES[name]
    write_config(case.shape, folder / "models" / case.shape, TOKENIZER)
    readings = dict(read(name, folder))  # of each phase, the last
    plan = resolve(load(Config, None, settings(name, folder)), case.num_ranks, capacity_bytes)
    for rank in range(case.num_ranks):
        for phase in PHASES:
            one = readings[phase][rank]
            yield compared(
                f"{name}, {case.shape}, rank {rank}, {phase}: planned over measured",
                plan.ledgers[rank].resident_bytes(phase) / 2**30,
                "GiB",
                peer="measured",
                peer_value=(one["outside_bytes"] + one["peak_bytes"]) / 2**30,
                at_least=LEAST,
                at_most=MOST,
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
        write_prompts(folder / "prompts.jsonl", 64)
        for case in options.cases:
            rows += measure(case, folder, capacity_bytes)
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
