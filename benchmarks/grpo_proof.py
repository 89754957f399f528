"""End-to-end proof: GRPO on one GPU with every token's log-prob compared bit for bit.

It runs the recipe `grpo` (proof_recipe.py) from the command line, with trainer and engine on the
same GPU. The models have the shapes of Qwen3-0.6B and 4B and random weights, which really move:
answers of even token ids are rewarded. CUDA graphs, prefix cache and continuous batching are on.
No dtype is set: the default must be bfloat16, and the contract must promise equal bits.

Prompts have 8 to 400 tokens. An answer ends at 512 tokens or at one of 300 token ids, which happens
after a few hundred tokens, so sequences come and go all the time. The engine's steps are short
enough that prompts are split, and pages are few enough that sequences are preempted and resumed.
The bar is zero unequal tokens, among two million for 0.6B alone.

The log-prob of a chosen token can hide differences in other logits. So a sample of each prompt of
the last step goes through engine and trainer once more, with the initial weights. HashTap of every
row after every op are compared, including whole rows of logits.

    python -m benchmarks.grpo_proof [--save] [0.6B 4B]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.ran_files import A_RUN
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.shapes import is_hybrid, title, write_folder
from benchmarks.table import Row
from spmd_rl.controller.contracts import CONTRACT_FILE, disagreement, not_promised
from spmd_rl.microscope.diagnose.compare import unequal_rows
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.replay.inputs import case_of_samples, find_samples, run_settings
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.rollout.native.config import NativeEngineConfig

PACKAGES = (
    "torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "transformers",
    "numpy",
)
RECIPE = "benchmarks.proof_recipe"
TOKENIZER = Path("examples/arithmetic/model-20m")  # a token a character
FEW_PAGES = [
    "--engine.num_pages=600",
    "--trainer.backend.recompute=cheap",
    "--trainer.max_tokens=8192",
]
MOMENTS_ASIDE = [*FEW_PAGES, "--trainer.backend.offload=moments"]
FAMILIES = {
    "3.5-9B@8": (20, 24, FEW_PAGES),
    "3.5-35B-A3B@8": (8, 24, MOMENTS_ASIDE),
    "moonlight@8": (20, 24, FEW_PAGES),
    "gpt-oss-20b@8": (8, 24, MOMENTS_ASIDE),
}
STEPS = {
    "0.6B": (8, 52, ["--engine.num_pages=450"]),
    "4B": (
        4,
        33,
        [
            "--engine.num_pages=450",
            "--trainer.backend.recompute=cheap",
            "--trainer.max_tokens=8192",
        ],
    ),
    **FAMILIES,
}  # steps, prompts, more
SAMPLES, NEW_TOKENS, STOP_IDS = 16, 512, 300
SHORTEST, LONGEST = 8, 400
MAX_BATCH, STEP_TOKENS = 512, 2048
USED = {  # events that must happen at least once
    "recorded graphs": "num_graphs",
    "prompts cut into chunks": "num_partial_chunks",
    "pages of a prompt's tail copied": "num_copied_tails",
    "sequences preempted": "num_preemptions",
}
BAR_TOKENS = 2_000_000
ALONE = "0.6B"  # the model whose own tokens are so many
LEAST_LOGITS = 1000  # rows
LEAST_HITS = 0.8  # of a prompt's tokens: 16 samples share it
LEAST_HITS_OF_STATES = 0.5  # which sequences compute again that were preempted
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def write_prompts(path: Path, count: int) -> None:
    rng = random.Random(0)
    sizes = [rng.randint(SHORTEST, LONGEST) for _ in range(count)]
    lines = ["".join(rng.choices("0123456789+", k=size - 1)) + "=" for size in sizes]
    path.write_text("".join(json.dumps({"prompt": line, "answer": ""}) + "\n" for line in lines))


def options_of(name: str, folder: Path) -> list[str]:
    steps, prompts, more = STEPS[name]
    return [
        f"--model={folder / name}",
        f"--data={folder / 'prompts.jsonl'}",
        f"--reward={RECIPE}:even",
        f"--run.folder={folder}",
        f"--run.name=run-{name}",
        f"--steps={steps}",
        f"--prompts_per_step={prompts}",
        f"--sampling.num_samples={SAMPLES}",
        f"--sampling.max_tokens={NEW_TOKENS}",
        f"--sampling.stop_ids={list(range(1000, 1000 + STOP_IDS))}",
        f"--engine.max_batch={MAX_BATCH}",
        f"--engine.max_step_tokens={STEP_TOKENS}",
        "--engine.load_weights=false",
        "--trainer.lr=1e-5",
        *more,
    ]


def broken_promises(run: Path) -> list[str]:
    """Return the recorded contracts that promise no equal bits, or are not in bfloat16."""
    followed = json.loads((run / CONTRACT_FILE).read_text())
    broken = [] if any("->" in name for name in followed) else ["no link kept what its ends follow"]
    for name, kept in followed.items():
        contracts = {party: contract["facts"] for contract in kept for party in contract["by"]}
        types = {
            party: facts["dtype"]
            for party, facts in contracts.items()
            if facts["dtype"] != "torch.bfloat16"
        }
        clauses = [f"{party} computes in {dtype}" for party, dtype in types.items()]
        broken += [
            f"{name}: {one}"
            for one in (disagreement(contracts), not_promised(contracts), *clauses)
            if one
        ]
    return broken


def one_of_each_prompt(run: Path) -> list[str]:
    """Return the name of one sample a prompt of the last step."""
    last = max((run / "samples").glob("step_*.jsonl"))
    rows = map(json.loads, last.read_text().split("\n")[:-1])
    return list(
        {
            row["prompt_uid"]: f"{row['prompt_uid']}:{row['index']}"
            for row in rows
            if row["tokens"]
        }.values()
    )


def replayed(what: str, model: Path, run: Path) -> Iterator[Row]:
    samples = find_samples(run, one_of_each_prompt(run))
    case = case_of_samples(samples, model, run_settings(run))
    tables = HashTap(case.num_rows), HashTap(case.num_rows)
    ours, trainers = (load_model(model, DTYPE, DEVICE) for _ in range(2))
    cfg = NativeEngineConfig(max_batch=MAX_BATCH, max_step_tokens=STEP_TOKENS)
    for path, hashes in zip((EnginePass(ours, cfg), TrainerPass(trainers)), tables, strict=True):
        path.run(case, hashes)
    logits = Point(ours.spec.num_layers, "logits")
    unequal = unequal_rows(*tables)
    both = tables[0].observed(logits) & tables[1].observed(logits)
    num_logits = int(both[: case.num_rows].sum())
    yield measured(
        f"{what}: whole rows of logits compared", num_logits, "rows", at_least=LEAST_LOGITS
    )
    differ = sum(len(rows) for rows in unequal.values())
    yield measured(
        f"{what}: rows that differ after any op, at {len(unequal)} points",
        differ,
        "rows",
        at_most=0,
    )


def measure(name: str, folder: Path) -> Iterator[Row]:
    write_folder(name, folder / name, TOKENIZER)
    write_prompts(folder / "prompts.jsonl", 512)
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        RECIPE,
    ]
    began = time.time()
    subprocess.run([*command, "--nproc=1", *options_of(name, folder)], check=True)
    seconds = time.time() - began
    run = folder / f"run-{name}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    broken = broken_promises(run)
    for clause in broken:
        print(clause, flush=True)

    def total(metric: str) -> float:
        return sum(step[metric] for step in steps)

    what = f"{title(name)}, {len(steps)} steps"
    compared = total("onpolicy/compared_tokens")
    yield measured(f"{what}: broken promises of equal bits in bfloat16", len(broken), "", at_most=0)
    least = BAR_TOKENS if name == ALONE else None
    yield measured(f"{what}: compared tokens", compared, "tokens", at_least=least)
    not_compared = steps[-1]["engine/num_generated_tokens"] - compared
    yield measured(
        f"{what}: generated tokens that were not compared", not_compared, "tokens", at_most=0
    )
    yield measured(
        f"{what}: unequal tokens", total("onpolicy/mismatched_tokens"), "tokens", at_most=0
    )
    yield measured(
        f"{what}: largest difference", max(step["onpolicy/max_abs_dlogp"] for step in steps), "nats"
    )
    for place, step in (("first", steps[0]), ("last", steps[-1])):
        yield measured(f"{what}: mean reward of the {place} step", step["reward/mean"], "")
    yield measured(
        f"{what}: rollout, median",
        statistics.median(s["rollout/tokens_per_s"] for s in steps),
        "tokens/s",
    )
    yield measured(
        f"{what}: step, median", statistics.median(step["time/step"] for step in steps), "s"
    )
    last = steps[-1]
    hits = last["engine/num_hit_tokens"] / last["engine/num_lookup_tokens"]
    least_hits = LEAST_HITS_OF_STATES if is_hybrid(name) else LEAST_HITS
    yield measured(f"{what}: prompt tokens from the prefix cache", hits, "", at_least=least_hits)
    yield measured(
        f"{what}: weights that generated, each of other bits",
        last["engine/num_weights"],
        "",
        at_least=len(steps),
    )
    for said, counter in USED.items():
        yield measured(f"{what}: {said}", last[f"engine/{counter}"], "", at_least=1)
    yield measured(f"{what}: start to end", seconds, "s")
    yield from replayed(what, folder / name, run)


def prove(script: str, doc: str | None, models: list[str]) -> int:
    """Run the models of the command line, or these, and record them; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=models)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        for name in options.models:
            rows += measure(name, Path(folder))
    compared = sum(row.value for row in rows if row.what.endswith(" compared tokens"))
    rows.append(measured("compared tokens of all models", compared, "tokens", at_least=BAR_TOKENS))
    return finish(
        script, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(prove(__file__, __doc__, ["0.6B", "4B"]))
