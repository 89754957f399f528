"""This code beside an earlier commit's: decode step, rollout, training step, call, the demo's step.

Both run in the same environment, each from its own folder, and take turns in slices of a few
seconds. What they run is a recipe that names only what both have (beside_recipe.py), so that the
controller, the channel and the worker's loop are part of every figure.

- Decode step: (T(long) - T(short)) / (long - short), where T(n) is the time of a call of `generate`
  that draws n tokens after each prompt. Start-up and prefill cancel.
- Rollout: 512 prompts with 8 samples each in one call. A share of the token ids ends a sample, so
  that lengths are unequal. Figures are per token, since the two may draw others.
- Training step: a step of GRPO's loss and AdamW on samples of equal length (beside_train.py).
- Control call: `stats` of an idle engine on two ranks, per call.
- Demo: a step of examples/arithmetic on two ranks, after a few supervised steps (beside_demo.py).
  The bar is on what both codes have: where the earlier one does not compare the weights of every
  push, this one does not either. Its step as shipped is in a row of its own.

On a GPU the model has the shape of Qwen3-0.6B and random weights; call and demo are left out. On a
CPU it is that of the demo, with random weights.

    python -m benchmarks.beside_commit [--tar then.tar] [--quick] [--save] [PART ...]

The parts are decode, rollout, train, control and demo. The commit is 174735e1, or that of a file of
`git archive COMMIT spmd_rl examples`, such as a copy on a host without git.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.grpo_step.work import SIZES, write_model
from benchmarks.peer import Peer
from benchmarks.ran_files import A_RUN
from benchmarks.record import MACHINE, compared, finish, gpu, gpu_machine
from benchmarks.shapes import VOCAB, write_folder
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
COMMIT, BAR = "174735e1", 1.02
GPU_TOKENIZER = ROOT / "examples/arithmetic/model-20m"
PROMPTS, SAMPLES = 512, 8
NOW, SHIPPED, THEN = "now", "as shipped", "then"
COMPARISON = "verify_every"  # the setting of a run by which pushes are compared


@dataclass(frozen=True)
class Work:
    """What is measured on a machine. `decode` are batches, `short` and `long` answers of them; a
    rollout draws at most `new_tokens`, or up to one of so many `stop_ids`. A training step has
    `train_samples` of `train_length` tokens.
    """

    model: str
    vocab: int
    prompt: int
    decode: tuple[int, ...]
    short: int
    long: int
    new_tokens: int
    stop_ids: int
    train_samples: int
    train_length: int
    decode_turns: int
    rollout_turns: int
    train_turns: int
    engine: tuple[str, ...] = ()


ON_CPU = Work(
    f"{SIZES[0].millions}M parameters", 100, 32, (1, 64), 16, 64, 64, 3, 64, 128, 8, 6, 12
)
ON_GPU = Work(
    "Qwen3-0.6B",
    VOCAB,
    128,
    (1, 64, 256),
    128,
    384,
    192,
    300,
    32,
    1024,
    5,
    3,
    12,
    ("--engine.num_pages=1600", "--engine.max_batch=512"),
)
DEMO_TURNS, DEMO_LAPS, DEMO_RANKS = 15, 4, 2
CALLS, CALL_TURNS, CALL_RANKS = 300, 15, 2


@dataclass
class Side:
    """One of the codes, and the times and processor times that it took, in seconds."""

    peer: Peer
    code: Path
    wall_s: list[float]
    cpu_s: list[float]

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask it for work. Raises: RuntimeError if other code than its own answers."""
        reply = self.peer.ask(**request)
        if Path(reply["code"]) != self.code:
            raise RuntimeError(f"the code of {reply['code']} answered instead of {self.code}")
        return reply


def unpack(tar: Path, folder: Path) -> str:
    """Unpack the earlier code, and return its commit, which `git archive` has noted."""
    with tarfile.open(tar) as archive:
        archive.extractall(folder, filter="data")
        return str(archive.pax_headers.get("comment", "unknown"))


def roots(tar: Path, folder: Path) -> tuple[dict[str, Path], str]:
    """Return the folders from which both codes run, with these benchmarks, and the commit."""
    commit = unpack(tar, folder / "archive")
    for name in ("spmd_rl", "examples"):
        (folder / "archive" / name).rename(folder / THEN / name)
    (folder / THEN / "benchmarks").symlink_to(ROOT / "benchmarks")
    return {NOW: ROOT, THEN: folder / THEN}, commit


@contextmanager
def started(
    code: dict[str, Path], words: list[str], ranks: int, **more: list[str]
) -> Iterator[dict[str, Side]]:
    """Yield all sides, each in the middle of a recipe. `more` has further words for some."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))

        def start(name: str) -> Peer:
            environment = {
                "PYTHONPATH": os.pathsep.join([str(code[name]), *sys.path[1:]]),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            command = [sys.executable, *run, "-m", "spmd_rl", "run", *words]
            command += [f"--run.folder={folder}", f"--run.name={name}", "--run.save_every=0"]
            command += more.get(name, [])
            peer = Peer(command, environment, folder / f"{name}.log", code[name])
            return stack.enter_context(peer)

        with ThreadPoolExecutor() as pool:
            peers = list(pool.map(start, code))
        yield {
            name: Side(peer, code[name].resolve(), [], [])
            for name, peer in zip(code, peers, strict=True)
        }


def take_turns(sides: dict[str, Side], turns: int, turn: Callable[[Side, int], None]) -> None:
    """Have all sides do `turn`, in changing order; the first turn of each is a warm-up."""
    for number in range(1 + turns):
        for side in list(sides.values())[:: 1 if number % 2 else -1]:
            if number <= 1:
                side.wall_s, side.cpu_s = [], []
            turn(side, number)


def rows_of(
    what: str, sides: dict[str, Side], unit: str, scale: float, side: str = NOW
) -> Iterator[Row]:
    now, then = sides[side], sides[THEN]
    peer = "the earlier commit"
    yield compared(
        what,
        scale * median(now.wall_s),
        unit,
        peer=peer,
        peer_value=scale * median(then.wall_s),
        at_most=BAR if side == NOW else None,
    )
    yield compared(
        f"{what}, least",
        scale * min(now.wall_s),
        unit,
        peer=peer,
        peer_value=scale * min(then.wall_s),
    )
    yield compared(
        f"{what}, processor time of all processes",
        scale * median(now.cpu_s),
        unit,
        peer=peer,
        peer_value=scale * median(then.cpu_s),
    )


def decode(work: Work, sides: dict[str, Side], turns: int) -> Iterator[Row]:
    for batch in work.decode:

        def turn(side: Side, number: int, batch: int = batch) -> None:
            request = {"prompts": batch, "length": work.prompt, "samples": 1, "stop_ids": []}
            short, long = (
                side.ask(seed=number, new_tokens=tokens, **request)
                for tokens in (work.short, work.long)
            )
            steps = work.long - work.short
            side.wall_s.append((long["seconds"] - short["seconds"]) / steps)
            side.cpu_s.append((long["cpu_s"] - short["cpu_s"]) / steps)

        take_turns(sides, turns, turn)
        yield from rows_of(f"{work.model}, batch {batch}: decode step", sides, "ms", 1e3)


def rollout(work: Work, sides: dict[str, Side], turns: int) -> Iterator[Row]:
    def turn(side: Side, number: int) -> None:
        reply = side.ask(
            seed=number,
            prompts=PROMPTS,
            length=work.prompt,
            samples=SAMPLES,
            new_tokens=work.new_tokens,
            stop_ids=list(range(10, 10 + work.stop_ids)),
        )
        side.wall_s.append(reply["seconds"] / reply["num_tokens"])
        side.cpu_s.append(reply["cpu_s"] / reply["num_tokens"])

    take_turns(sides, turns, turn)
    what = f"{work.model}, rollout of {PROMPTS} x {SAMPLES}: time for a token"
    yield from rows_of(what, sides, "us", 1e6)


def train(work: Work, sides: dict[str, Side], turns: int) -> Iterator[Row]:
    def turn(side: Side, number: int) -> None:
        reply = side.ask(seed=number, samples=work.train_samples, length=work.train_length)
        side.wall_s.append(reply["seconds"])
        side.cpu_s.append(reply["cpu_s"])

    take_turns(sides, turns, turn)
    what = f"{work.model}, training step of {work.train_samples} x {work.train_length} tokens"
    yield from rows_of(what, sides, "ms", 1e3)


def control(sides: dict[str, Side], turns: int) -> Iterator[Row]:
    def turn(side: Side, number: int) -> None:
        reply = side.ask(calls=CALLS)
        side.wall_s.append(reply["seconds"] / CALLS)
        side.cpu_s.append(reply["cpu_s"] / CALLS)

    take_turns(sides, turns, turn)
    yield from rows_of("a call of two workers", sides, "us", 1e6)


def demo(sides: dict[str, Side], turns: int) -> Iterator[Row]:
    def turn(side: Side, number: int) -> None:
        reply = side.ask(laps=DEMO_LAPS)
        side.wall_s.append(median(reply["seconds"]))
        side.cpu_s.append(reply["cpu_s"] / DEMO_LAPS)

    take_turns(sides, turns, turn)
    what = "a step of the demo on two ranks"
    if SHIPPED in sides:
        yield from rows_of(f"{what}, without the comparison of pushes", sides, "ms", 1e3)
        yield from rows_of(f"{what}, as shipped", sides, "ms", 1e3, SHIPPED)
    else:
        yield from rows_of(what, sides, "ms", 1e3)


def compares_pushes(code: Path) -> bool:
    """Return whether runs of this code have the setting by which pushes are compared."""
    return any(COMPARISON in file.read_text() for file in (code / "spmd_rl").rglob("*.py"))


def write_the_model(work: Work, folder: Path) -> None:
    if work is ON_GPU:
        write_folder("0.6B", folder / "model", GPU_TOKENIZER)
    else:
        write_model(SIZES[0], folder)


def measure(parts: list[str], tar: Path, folder: Path, *, quick: bool) -> tuple[list[Row], str]:
    """Return the rows of these parts, and the earlier commit."""
    work, rows = ON_GPU if torch.cuda.is_available() else ON_CPU, list[Row]()
    (folder / THEN).mkdir()
    code, commit = roots(tar, folder)
    about = [f"--model={folder / 'model'}", f"--vocab={work.vocab}"]
    if set(parts) != {"demo"}:
        write_the_model(work, folder)
    if {"decode", "rollout"} & set(parts):
        with started(code, ["benchmarks.beside_recipe", *about, *work.engine], 1) as sides:
            if "decode" in parts:
                rows += decode(work, sides, 1 if quick else work.decode_turns)
            if "rollout" in parts:
                rows += rollout(work, sides, 1 if quick else work.rollout_turns)
    if "train" in parts:
        with started(code, ["benchmarks.beside_train", *about], 1) as sides:
            rows += train(work, sides, 1 if quick else work.train_turns)
    if "control" in parts:
        with started(code, ["benchmarks.beside_recipe", *about], CALL_RANKS) as sides:
            rows += control(sides, 1 if quick else CALL_TURNS)
    if "demo" in parts:
        words = ["benchmarks.beside_demo", "--config=examples/arithmetic/demo.toml"]
        words += ["--warmup_steps=10", "--steps=260"]
        apart: dict[str, list[str]] = {}
        if not compares_pushes(code[THEN]):
            code[SHIPPED], apart = ROOT, {NOW: [f"--run.{COMPARISON}=0"]}
        with started(code, words, DEMO_RANKS, **apart) as sides:
            rows += demo(sides, 1 if quick else DEMO_TURNS)
    return rows, commit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="by default all that this machine measures")
    parser.add_argument("--tar", type=Path, help="the earlier code, as git archive packs it")
    parser.add_argument("--quick", action="store_true", help="one turn of each")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    parts = options.parts or [
        "decode",
        "rollout",
        "train",
        *([] if on_gpu else ["control", "demo"]),
    ]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, tar = Path(name), options.tar
        if tar is None:
            tar = folder / "then.tar"
            words = ["git", "archive", f"--output={tar}", COMMIT, "spmd_rl", "examples"]
            subprocess.run(words, cwd=ROOT, check=True)
        rows, commit = measure(parts, tar, folder, quick=options.quick)
    versions = {"the earlier commit": commit} | (gpu() if on_gpu else {})
    machine = gpu_machine() if on_gpu else MACHINE
    return finish(
        __file__,
        ("torch", "numpy"),
        rows,
        save=options.save,
        rooms=A_RUN,
        machine=machine,
        **versions,
    )


if __name__ == "__main__":
    sys.exit(main())
