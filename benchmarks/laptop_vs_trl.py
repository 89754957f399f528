"""One whole GRPO step on one CPU thread, ours and TRL's, with equal work at three sizes.

The work is in grpo_step/work.py. Our step is push, rollout, reward, pack and train through the real
controller, with the bitwise mismatch check on. Both sides stay alive and take turns. Each number is
the median step over all turns.

TRL runs in an interpreter of its own, with trl==1.16.0, datasets and accelerate, as for
losses_vs_trl.py. With --before, a third side is an earlier commit's code with its own benchmark,
from a file of `git archive COMMIT spmd_rl examples benchmarks`; it takes turns with the others.

    python -m benchmarks.laptop_vs_trl --python trl/bin/python [--before then.tar] [--quick]
        [--save] [--sizes 0.14,1.0]
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside_commit import unpack
from benchmarks.grpo_step.work import SIZES, Size, write_model, write_prompts
from benchmarks.peer import Peer
from benchmarks.ran_files import A_RUN
from benchmarks.record import compared, finish, measured
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
AT_MOST = 0.5
NO_MORE = 1.03  # than the earlier commit
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


def contest(
    size: Size, folder: Path, turns: int, laps: int, trl_python: str, before: Path | None
) -> Iterator[Row]:
    """Measure all sides at one size. `before` is the folder of an earlier commit's code."""
    write_model(size, folder)
    write_prompts(folder / "prompts.jsonl")
    starts = {"ours": (sys.executable, ROOT), "trl": (trl_python, ROOT)}
    if before is not None:
        starts["before"] = sys.executable, before
    with contextlib.ExitStack() as stack:
        peers = {
            name: stack.enter_context(_start(name, python, root, folder))
            for name, (python, root) in starts.items()
        }
        sides = {name: Side(peer, peer.ask(laps=1)) for name, peer in peers.items()}
        _check_equal(sides["ours"].first, sides["trl"].first)
        for side in sides.values():
            side.peer.ask(laps=WARM_LAPS)
        for turn in range(turns):
            for side in list(sides.values())[:: 1 if turn % 2 else -1]:
                side.turn(laps)
        yield from _rows(size, sides["ours"], sides["trl"])
        if before is not None:
            yield from _rows_beside(size, sides["ours"], sides["before"])


def _start(name: str, python: str, root: Path, folder: Path) -> Peer:
    model, data = str(folder / "model"), str(folder / "prompts.jsonl")
    run = [f"--run.folder={folder / name}", f"--model={model}", f"--data={data}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    ours = [*torchrun, "-m", "spmd_rl", "run", "benchmarks.grpo_step.ours", *run]
    words = ["-m", "benchmarks.grpo_step.trl_side", model, data] if name == "trl" else ours
    environment = ENVIRONMENT | {"PYTHONPATH": str(root)}
    return Peer([python, *words], environment, folder / f"{name}.log", root)


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
    num_tokens = ours.last["generated_tokens"]
    if (
        num_tokens != trl.last["generated_tokens"]
        or num_tokens != ours.last["compared_tokens"]
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


def _rows_beside(size: Size, ours: Side, before: Side) -> Iterator[Row]:
    what, peer = f"GRPO step, {size.millions}M parameters", "the earlier commit"
    times = median(ours.seconds) * 1e3, median(before.seconds) * 1e3
    least = min(ours.seconds) * 1e3, min(before.seconds) * 1e3
    cpu = median(ours.cpu_s) * 1e3, median(before.cpu_s) * 1e3
    yield compared(what, times[0], "ms", peer=peer, peer_value=times[1], at_most=NO_MORE)
    yield compared(f"{what}, least", least[0], "ms", peer=peer, peer_value=least[1])
    yield compared(f"{what}, CPU time", cpu[0], "ms", peer=peer, peer_value=cpu[1])


def mend(code: Path) -> None:
    """Let an earlier benchmark do without what the first step does not measure."""
    file = code / "benchmarks/grpo_step/ours.py"
    asked = re.compile(r'stats\["(onpolicy/\w+)"\]')
    file.write_text(asked.sub(r'stats.get("\1", 0.0)', file.read_text()))


def _versions(python: str) -> dict[str, str]:
    """Return the versions of TRL's packages, as its interpreter has them."""
    names = ("trl", "transformers", "accelerate")
    program = f"from importlib.metadata import version; print(*map(version, {names}))"
    told = subprocess.check_output([python, "-c", program], text=True).split()
    return dict(zip(names, told, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/laptop/laptop_vs_trl.json"
    )
    parser.add_argument("--python", default=sys.executable, help="of the environment with TRL")
    parser.add_argument("--before", type=Path, help="an earlier commit, as git archive packs it")
    parser.add_argument("--sizes", default=",".join(size.millions for size in SIZES))
    arguments = parser.parse_args()
    turns, laps = (2, 2) if arguments.quick else (8, 4)
    rows: list[Row] = []
    versions, before = _versions(arguments.python), None
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        if arguments.before is not None:
            before = Path(name)
            versions["the earlier commit"] = unpack(arguments.before, before)
            mend(before)
        for size in SIZES:
            if size.millions in arguments.sizes.split(","):
                with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                    rows += contest(size, Path(folder), turns, laps, arguments.python, before)
    return finish(__file__, ("torch",), rows, save=arguments.save, rooms=A_RUN, **versions)


if __name__ == "__main__":
    sys.exit(main())
