"""One whole GRPO step on one CPU thread, ours and TRL's, with equal work at three sizes.

The work is in grpo_step/work.py. Our step is push, rollout, reward, pack and train through the real
controller, with the bitwise mismatch check on. Both sides stay alive and take turns. Each number is
the median step over all turns.

    python -m benchmarks.laptop_vs_trl [--quick] [--save] [--sizes 0.14,1.0]

Needs: pip install trl==1.16.0 datasets accelerate, beside this package.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.grpo_step.work import SIZES, Size, write_model, write_prompts
from benchmarks.peer import Peer
from benchmarks.record import compared, finish, measured
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
AT_MOST = 0.5
SAME_NORM = 1e-3  # relative, of the gradient at the same weights and tokens
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
WARM_LAPS = 2


@dataclass
class Side:
    """One contender and its measurements."""

    peer: Peer
    first: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def turn(self, laps: int) -> None:
        self.last = self.peer.ask(laps=laps)
        self.seconds += self.last["seconds"]
        self.cpu_s.append(self.last["cpu_s"] / laps)


def contest(size: Size, folder: Path, turns: int, laps: int) -> Iterator[Row]:
    """Measure both sides at one size."""
    write_model(size, folder)
    write_prompts(folder / "prompts.jsonl")
    with _start("ours", folder) as ours, _start("trl", folder) as trl:
        sides = [Side(peer, peer.ask(laps=1)) for peer in (ours, trl)]
        _check_equal(*(side.first for side in sides))
        for side in sides:
            side.peer.ask(laps=WARM_LAPS)
        for _ in range(turns):
            for side in sides:
                side.turn(laps)
        yield from _rows(size, *sides)


def _start(name: str, folder: Path) -> Peer:
    model, data = str(folder / "model"), str(folder / "prompts.jsonl")
    run = [f"--run.folder={folder / 'runs'}", f"--model={model}", f"--data={data}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    commands = {
        "ours": [*torchrun, "-m", "spmd_rl", "run", "benchmarks.grpo_step.ours", *run],
        "trl": ["-m", "benchmarks.grpo_step.trl_side", model, data],
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Peer(
        [sys.executable, *commands[name]],
        ENVIRONMENT | {"PYTHONPATH": path},
        folder / f"{name}.log",
    )


def _check_equal(ours: dict[str, Any], trl: dict[str, Any]) -> None:
    """Raises: SystemExit unless both sides did the same first step, on given completions.

    They must do the same work and have the same gradient.
    """
    for count in ("generated_tokens", "gradient_tokens", "prompt_tokens"):
        if ours[count] != trl[count]:
            raise SystemExit(f"unequal work: {count} {ours[count]} and {trl[count]}")
    if abs(ours["grad_norm"] / trl["grad_norm"] - 1) > SAME_NORM:
        raise SystemExit(f"unequal work: gradient norms {ours['grad_norm']} and {trl['grad_norm']}")


def _rows(size: Size, ours: Side, trl: Side) -> Iterator[Row]:
    if (
        ours.last["generated_tokens"] != trl.last["generated_tokens"]
        or ours.last["mismatched_tokens"]
    ):
        raise SystemExit(
            f"{size.millions}M: unequal work or mismatched tokens: {ours.last} {trl.last}"
        )
    what = f"GRPO step, {size.millions}M parameters"
    yield compared(
        what,
        median(ours.seconds) * 1e3,
        "ms",
        peer="TRL",
        peer_value=median(trl.seconds) * 1e3,
        at_most=AT_MOST,
    )
    yield compared(
        f"{what}, least",
        min(ours.seconds) * 1e3,
        "ms",
        peer="TRL",
        peer_value=min(trl.seconds) * 1e3,
    )
    yield compared(
        f"{what}, CPU time",
        median(ours.cpu_s) * 1e3,
        "ms",
        peer="TRL",
        peer_value=median(trl.cpu_s) * 1e3,
    )
    off = abs(ours.first["grad_norm"] / trl.first["grad_norm"] - 1)
    yield measured(
        f"{what}: gradient norms at equal tokens differ by", off, "relative", at_most=SAME_NORM
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/laptop/laptop_vs_trl.json"
    )
    parser.add_argument("--sizes", default=",".join(size.millions for size in SIZES))
    arguments = parser.parse_args()
    turns, laps = (2, 2) if arguments.quick else (8, 4)
    rows: list[Row] = []
    for size in SIZES:
        if size.millions in arguments.sizes.split(","):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                rows += contest(size, Path(folder), turns, laps)
    return finish(
        __file__, ("torch", "transformers", "trl", "accelerate"), rows, save=arguments.save
    )


if __name__ == "__main__":
    sys.exit(main())
