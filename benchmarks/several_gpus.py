"""GRPO on several GPUs of one host: equal bits on every split, and where the time of a step goes.

The recipe `grpo` (several_recipe.py) runs once for each placement of its roles, with the same seed
and random weights:

    colocated   all ranks train and generate
    split       half of the ranks train, the others generate
    mixed       all ranks train, and half of them generate too

Bars: no token's log-prob differs between engine and trainer, and the first step draws the same
samples on every placement. Later steps need not: shards sum gradients in another order. Values are
medians over the steps after the first. Idle is the time of a step that is in no phase.

    python -m benchmarks.several_gpus [--shape 0.6B] [--ranks 4] [--steps 3] [--prompts 64]
        [--save] [colocated split mixed] [--KEY=VALUE ...]

More settings are for every run, such as --split.infer.tp=2, where ranks share an engine's model.
With --shape 8B it takes 8 prompts with 16 samples of at most 7,168 tokens, and whatever does not
fit sleeps. On a machine without a GPU, --shape demo tries the script with the demo's model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.grpo_proof import TOKENIZER, broken_promises, write_prompts
from benchmarks.ran_files import A_RUN
from benchmarks.record import MACHINE, counted, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.observe.samples_file import read_groups

PACKAGES = ("torch", "numpy")
RECIPE = "benchmarks.several_recipe"
PLACEMENTS = ("colocated", "split", "mixed")
PHASES = ("sync", "sleep", "wake", "rollout", "train")
LOST = ("sync", "sleep", "wake")  # phases that generate nothing and learn nothing
DEMO = Path("examples/arithmetic/model")


@dataclass(frozen=True)
class Work:
    """What a step of a shape generates."""

    prompts: int
    samples: int
    new_tokens: int
    steps: int
    more: tuple[str, ...] = ()


WORK = {
    "demo": Work(8, 4, 16, 3, ("--engine.num_pages=256", "--prompts.max_prompt_tokens=100")),
    "0.6B": Work(128, 16, 512, 4, ("--trainer.dtype=bfloat16",)),
    "4B": Work(64, 16, 512, 3, ("--trainer.dtype=bfloat16", "--trainer.backend.recompute=cheap")),
    "8B": Work(8, 16, 7168, 3, ("--trainer.dtype=bfloat16", "--trainer.backend.recompute=all")),
}


def placement_words(placement: str, num_ranks: int) -> list[str]:
    """Return the settings that place the roles on `num_ranks` ranks, an even number."""
    half = num_ranks // 2
    return [f"--nproc={num_ranks}"] + {
        "colocated": [],
        "split": [f"--split.train.ranks={half}", f"--split.infer.ranks={half}"],
        "mixed": [f"--split.infer.ranks=0-{half - 1}"],
    }[placement]


def write_model(shape: str, folder: Path) -> None:
    if shape == "demo":
        shutil.copytree(DEMO, folder)
    else:
        write_config(shape, folder, TOKENIZER)


def run(
    shape: str, work: Work, placement: str, num_ranks: int, folder: Path, more: Sequence[str]
) -> Path:
    """Run the recipe with `more` settings, and return its folder."""
    command = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"
    words = [
        *placement_words(placement, num_ranks),
        f"--model={folder / 'models' / shape}",
        f"--data={folder / 'prompts.jsonl'}",
        "--reward=benchmarks.proof_recipe:even",
        f"--run.folder={folder}",
        f"--run.name={placement}",
        f"--steps={work.steps}",
        f"--prompts_per_step={work.prompts}",
        f"--sampling.num_samples={work.samples}",
        f"--sampling.max_tokens={work.new_tokens}",
        "--sampling.ignore_eos=true",
        "--engine.load_weights=false",
        "--trainer.init=random",
        "--trainer.lr=1e-5",
        "--run.exact=true",
        "--run.save_every=0",
        *work.more,
        *more,
    ]
    subprocess.run([sys.executable, "-c", command, "run", RECIPE, *words], check=True)
    return folder / placement


def drawn(folder: Path) -> list[Any]:
    """Return the tokens and log-probs of the first step's samples, in order."""
    return sorted(
        [group.prompt.uid, sample.index, sample.tokens.tolist(), sample.logprobs.tolist()]
        for group in read_groups(folder, 1)
        for sample in group.samples
    )


def rows_of(what: str, folder: Path, num_ranks: int) -> Iterator[Row]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    if torch.cuda.is_available():  # they are those of bfloat16
        broken = broken_promises(folder)
        yield measured(f"{what}: broken promises", len(broken), "contracts", at_most=0)
    unequal = sum(step["onpolicy/mismatched_tokens"] for step in steps)
    yield measured(f"{what}: unequal tokens", unequal, "tokens", at_most=0)
    compared = sum(step["onpolicy/compared_tokens"] for step in steps)
    yield measured(f"{what}: compared tokens", compared, "tokens", at_least=1)

    def typical(name: str) -> float:
        return statistics.median(step.get(name, 0.0) for step in steps[1:])

    seconds = typical("time/step")
    yield measured(f"{what}: step", seconds, "s")
    for phase in PHASES:
        yield measured(f"{what}: {phase}", typical(f"time/{phase}"), "s")
    idle = statistics.median(
        step["time/step"] - sum(step.get(f"time/{phase}", 0.0) for phase in PHASES)
        for step in steps[1:]
    )
    yield measured(f"{what}: idle", idle, "s")
    lost = (idle + sum(typical(f"time/{phase}") for phase in LOST)) / seconds
    yield measured(f"{what}: share of idle, sync, sleep and wake", lost, "")
    tokens = typical("train/tokens") / seconds / num_ranks
    yield measured(f"{what}: tokens of a step per second and GPU", tokens, "tokens/s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("placements", nargs="*", help=", ".join(PLACEMENTS))
    parser.add_argument("--shape", choices=WORK, default="0.6B")
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--steps", type=int, help="2 and more; otherwise the shape's own")
    parser.add_argument("--prompts", type=int, help="of a step; otherwise the shape's own")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--new-tokens", type=int, help="of an answer; otherwise the shape's own")
    options, more = parser.parse_known_args()
    work = WORK[options.shape]
    work = replace(
        work,
        steps=options.steps or work.steps,
        prompts=options.prompts or work.prompts,
        new_tokens=options.new_tokens or work.new_tokens,
    )
    if work.steps < 2:
        parser.error("--steps must be 2 or more: the first one is not timed")
    rows: list[Row] = []
    first: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_model(options.shape, folder / "models" / options.shape)
        write_prompts(folder / "prompts.jsonl", 4 * work.prompts)
        for placement in options.placements or PLACEMENTS:
            words = ", ".join([placement, *more])
            what = f"{options.shape}, {options.ranks} ranks, {words}"
            found = run(options.shape, work, placement, options.ranks, folder, more)
            rows += rows_of(what, found, options.ranks)
            first.append(drawn(found))
    if len(first) > 1:
        what = (
            f"{options.shape}, {options.ranks} ranks: placements that draw the first one's samples"
        )
        rows.append(counted(what, [one == first[0] for one in first]))
    on_gpu = torch.cuda.is_available()
    machine, facts = (gpu_machine(), gpu()) if on_gpu else (MACHINE, {})
    return finish(
        __file__, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=machine, **facts
    )


if __name__ == "__main__":
    sys.exit(main())
