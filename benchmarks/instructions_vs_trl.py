"""examples/instructions on one GPU, by spmd_rl and by TRL: what each learns, and how fast.

    HF_HUB_OFFLINE=1 python -m benchmarks.instructions_vs_trl --out CURVES [--seeds 0 1 2]
        [--side ours] [--python trl/bin/python] [--limit-s 1500] [--KEY=VALUE ...]
    python -m benchmarks.instructions_vs_trl --join CURVES [--save]

Model, prompts and their order, grader, rate, optimizer, loss, batch and sampling are equal. They
are read from gpu.toml, which --KEY=VALUE changes as for spmd-rl. Each seed has an order of prompts
and draws of its own. A curve is kept in CURVES for each side and seed, so that several calls can
take place at once, each with its CUDA_VISIBLE_DEVICES. TRL needs trl==1.16.0, datasets and
accelerate, in an interpreter of its own or on PYTHONPATH, beside what spmd_rl needs. It generates
with transformers, in another run with their continuous batching and, where its interpreter can
import vllm, in one with vLLM.

What differs: TRL computes with autocast to bfloat16 over fp32 weights, in micro-batches of padded
samples; ours are packed. Its engine's log-probs are not those of its trainer. Its fp32 reference
runs under the same autocast. Its GRPO adds 1e-4 to a group's standard deviation, ours 1e-6.
Evaluations draw other samples in each run of TRL, and the same ones in ours.

Seconds are those of steps, with the first one's warm-up, and without evaluations, checkpoints and
the start. Rewards are measured every 10 steps, so that times to a reward are as coarse.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ran_files import A_RUN
from benchmarks.record import MACHINE, compared, finish, gpu, gpu_machine, measured
from benchmarks.table import Row

OURS = "ours"
# Engines of TRL's runs.
TRL = {"trl": "transformers", "trl-batching": "batching", "trl-vllm": "vllm"}
PEERS = {
    "trl": "TRL with transformers",
    "trl-batching": "TRL with continuous batching",
    "trl-vllm": "TRL with vLLM",
}
EVAL = "examples/instructions/eval.jsonl"
GOOD = 0.9
WARM_STEPS = 2
GRACE_S = 600.0  # for TRL's last step and evaluation
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
Curve = dict[str, Any]


def words_of(options: argparse.Namespace, seed: int, changes: Sequence[str]) -> list[str]:
    """Return the settings in which a run differs from gpu.toml; `changes` come last."""
    settings = {
        "model": options.model,
        "data": options.data,
        "steps": options.steps,
        "run.seed": seed,
        "prompts.seed": seed,
        "eval.sets": "{}",
        "eval.data": EVAL,
    }
    given = (word.removeprefix("--").split("=", 1) for word in changes)
    return [f"--{key}={value}" for key, value in (settings | dict(given)).items()]


def run_ours(folder: Path, words: list[str], limit_s: float) -> Curve:
    """Raises: RuntimeError if the run fails before its limit."""
    command = ["-m", "spmd_rl", "run", "grpo", "--config=examples/instructions/gpu.toml"]
    where = ["--nproc=1", f"--run.folder={folder}", f"--run.name={OURS}", "--run.save_every=0"]
    if not run([sys.executable, *command, *where, *words], folder / "log", limit_s):
        print(f"{folder}: the limit was reached")
    lines = (folder / OURS / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [
        {
            "seconds": row["time/step"] - row.get("time/eval", 0.0),
            "tokens": row["onpolicy/drawn_tokens"],
            "reward": row["reward/mean"],
        }
        for row in rows
        if "time/step" in row
    ]
    held_out = {str(row["step"]): row["eval/reward"] for row in rows if "eval/reward" in row}
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"steps": steps, "held_out": held_out, "versions": versions}


def run_trl(engine: str, folder: Path, words: list[str], options: argparse.Namespace) -> Curve:
    """Raises: RuntimeError if the run fails."""
    curve = folder / "curve.json"
    settings = [engine, str(curve), str(options.limit_s), str(options.micro)]
    command = [options.python, "-m", "benchmarks.instructions_trl", *settings, *words]
    run(command, folder / "log", options.limit_s + GRACE_S)
    return json.loads(curve.read_text())


def run(command: list[str], log: Path, limit_s: float) -> bool:
    """Run a command, and end it when its time is over. Returns whether it ended by itself.

    Raises: RuntimeError with its output if it fails.
    """
    environment = os.environ | ENVIRONMENT
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # the step is completed
        process.wait()
        return False
    if code:
        raise RuntimeError(f"{command} ended:\n{log.read_text()[-4000:]}")
    return True


def sides_of(options: argparse.Namespace) -> list[str]:
    if options.side != "all":
        return [options.side]
    sides = [OURS, "trl", "trl-batching"]
    program = [options.python, "-c", "import vllm"]
    if not subprocess.run(program, capture_output=True, check=False).returncode:
        sides.append("trl-vllm")
    return sides


def measure(options: argparse.Namespace, changes: list[str]) -> bool:
    """Run all sides and seeds, and write their curves. Returns whether none failed."""
    try:
        machine, card = gpu_machine(), gpu()
    except OSError:  # there is no GPU
        machine, card = MACHINE, {}
    failed, sides = False, sides_of(options)
    for seed in options.seeds:
        for side in sides:
            folder = options.out / f"{side}-{seed}"
            words = words_of(options, seed, changes)
            try:
                folder.mkdir(parents=True)
                if side == OURS:
                    curve = run_ours(folder, words, options.limit_s)
                else:
                    curve = run_trl(TRL[side], folder, words, options)
            except (OSError, RuntimeError) as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
                continue
            curve |= {"side": side, "seed": seed, "machine": machine}
            curve["versions"] |= card
            (options.out / f"{side}-{seed}.json").write_text(json.dumps(curve))
    return not failed


def rows_of(curves: list[Curve]) -> Iterator[Row]:
    for seed in sorted({curve["seed"] for curve in curves}):
        of_seed = {curve["side"]: curve for curve in curves if curve["seed"] == seed}
        at = sorted({int(step) for curve in of_seed.values() for step in curve["held_out"]})
        for step in at:
            rewards = {
                side: curve["held_out"][str(step)]
                for side, curve in of_seed.items()
                if str(step) in curve["held_out"]
            }
            yield from beside(f"seed {seed}: held-out reward after {step} steps", "", rewards)
        times = {side: time_to(GOOD, curve) for side, curve in of_seed.items()}
        reached = {side: time for side, time in times.items() if time is not None}
        yield from beside(f"seed {seed}: time to a held-out reward of {GOOD}", "s", reached)
        done = {side: len(curve["steps"]) for side, curve in of_seed.items()}
        yield from beside(f"seed {seed}: steps", "", done)
    sides = {curve["side"] for curve in curves}
    warm = {side: warm_steps(side, curves) for side in [OURS, *PEERS] if side in sides}
    warm = {side: steps for side, steps in warm.items() if steps}
    seconds = {side: [one["seconds"] for one in steps] for side, steps in warm.items()}
    tokens = {side: [one["tokens"] for one in steps] for side, steps in warm.items()}
    yield from beside("step, median", "s", {side: median(seconds[side]) for side in warm})
    yield from beside("tokens of a step, median", "", {side: median(tokens[side]) for side in warm})
    rates = {side: sum(tokens[side]) / sum(seconds[side]) for side in warm}
    yield from beside("generated tokens a second of a step", "tokens/s", rates)


def time_to(reward: float, curve: Curve) -> float | None:
    """Return the seconds of the steps before the first evaluation with this reward."""
    reached = [int(step) for step, value in curve["held_out"].items() if value >= reward]
    if not reached:
        return None
    return sum(one["seconds"] for one in curve["steps"][: min(reached)])


def warm_steps(side: str, curves: list[Curve]) -> list[dict[str, float]]:
    mine = (curve["steps"][WARM_STEPS:] for curve in curves if curve["side"] == side)
    return list(chain.from_iterable(mine))


def beside(what: str, unit: str, values: Mapping[str, float]) -> Iterator[Row]:
    """Yield our value beside each peer's, and alone where the other one is missing or 0."""
    peers = {side: value for side, value in values.items() if side != OURS}
    ours = values.get(OURS)
    if ours is not None and not any(peers.values()):
        yield measured(what, ours, unit)
    for side, value in peers.items():
        if ours is not None and value:
            yield compared(what, ours, unit, peer=PEERS[side], peer_value=value)
        else:
            yield measured(f"{what}, {PEERS[side]}", value, unit)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2-135m")
    parser.add_argument("--data", default="runs/instructions_data/train.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--side", choices=(OURS, *TRL, "all"), default="all")
    parser.add_argument("--python", default=sys.executable, help="of the environment with TRL")
    parser.add_argument("--limit-s", type=float, default=1e6, help="of each side and seed")
    parser.add_argument("--micro", type=int, default=64, help="samples of TRL's micro-batches")
    folders = parser.add_mutually_exclusive_group(required=True)
    folders.add_argument("--out", type=Path, help="a folder for curves")
    folders.add_argument("--join", type=Path, help="such a folder, to be read")
    parser.add_argument("--save", action="store_true")
    options, changes = parser.parse_known_args()
    all_ran = options.join is not None or measure(options, changes)
    files = sorted((options.join or options.out).glob("*.json"))
    curves = [json.loads(path.read_text()) for path in files]
    if not curves:
        return 1
    versions = {key: value for curve in curves for key, value in curve["versions"].items()}
    machine = curves[0]["machine"]
    rows = list(rows_of(curves))
    code = finish(__file__, (), rows, save=options.save, machine=machine, rooms=A_RUN, **versions)
    return code if all_ran else 1


if __name__ == "__main__":
    sys.exit(main())
