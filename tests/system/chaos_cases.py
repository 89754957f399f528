"""Cases of faults, drawn from a seed: which fault strikes which process and when.

A run has to end in an error that names its fault, or to complete as if there had been none.
"""

from __future__ import annotations

import random
import re
import signal
from dataclasses import dataclass, replace

from tests.system.faults import Fault

DEADLINE_S = 3.0
LOST_AFTER_S = 3.0

LOST = r"lost rank {rank} \(host \S+, pid \d+\)|rank {rank} was killed by SIGKILL"
LEFT = r"lost rank {rank} \(host \S+, pid \d+\), last heard .* in toiler.work.*"
SILENT = r"lost rank \d|lost the controller: silent|no answer from rank \d"
DISK = r"No space left on device|File too large|no room"
OUTSIDE = r"the run was ended from outside: (every rank|the controller) got SIG"


@dataclass(frozen=True)
class Case:
    """One fault, caused by the driver from outside, or by `frames` in a process of the run."""

    kind: str
    victim: str  # the struck process: "0", "1", "controller", "launcher", or "disk"
    delay_s: float  # after the first step, or after the launch for a fault at start-up
    expected: str  # pattern of the run's sentence; empty where the run must complete
    may_complete: bool = False
    codes: tuple[int, ...] = (1,)
    frames: Fault | None = None
    signal: signal.Signals | None = None
    at_start: bool = False
    recipe: str = "toy"
    settings: tuple[str, ...] = ()
    resumes: bool = False  # whether the same command has to complete it afterwards


def draw(kind: str, rng: random.Random) -> Case:
    """Return a case of this kind."""
    rank, delay_s = rng.choice("01"), rng.uniform(0.0, 2.0)
    match kind:
        case "kill rank":
            return Case(kind, rank, delay_s, LOST.format(rank=rank), signal=signal.SIGKILL)
        case "kill one, restarts":
            victim, settings = rng.choice(["0", "1", "controller"]), ("--max-restarts=1",)
            return Case(
                kind,
                victim,
                delay_s,
                "",
                may_complete=True,
                signal=signal.SIGKILL,
                settings=settings,
            )
        case "kill rank at start":
            delay_s = rng.uniform(0.0, 1.5)
            return Case(
                kind, rank, delay_s, LOST.format(rank=rank), signal=signal.SIGKILL, at_start=True
            )
        case "stop rank":
            return Case(
                kind, rank, delay_s, LOST.format(rank=rank) + f"|{SILENT}", signal=signal.SIGSTOP
            )
        case "a rank exits with 0":
            expected = LEFT.format(rank=rank) + "; the same command goes on after step 30"
            return Case(kind, rank, 0.0, expected, settings=(f"--leaves={rank}",))
        case "a rank exits with 0, restarts":
            settings = (f"--leaves={rank}", "--max-restarts=1")
            return Case(kind, rank, 0.0, "", may_complete=True, settings=settings)
        case "end one rank":
            number, code = rng.choice([(signal.SIGTERM, 143), (signal.SIGINT, 130)])
            expected = rf"outside: rank {rank} \(host \S+, pid \d+\) got {number.name}"
            # so many steps that the run lasts until the signal of one rank counts for all
            more_steps = ("--steps=400",)
            return Case(
                kind, rank, delay_s, expected, codes=(code,), signal=number, settings=more_steps
            )
        case "kill controller":
            return Case(
                kind,
                "controller",
                delay_s,
                r"the controller .*was killed by SIGKILL",
                signal=signal.SIGKILL,
            )
        case "stop controller":
            return Case(
                kind, "controller", delay_s, r"lost the controller: silent", signal=signal.SIGSTOP
            )
        case "kill launcher":
            return Case(
                kind, "launcher", delay_s, r"lost its launcher", codes=(-9,), signal=signal.SIGKILL
            )
        case "end launcher":
            return Case(kind, "launcher", delay_s, OUTSIDE, codes=(143,), signal=signal.SIGTERM)
        case "end controller":
            return Case(kind, "controller", delay_s, OUTSIDE, codes=(143,), signal=signal.SIGTERM)
        case "full disk":
            return Case(
                kind,
                rng.choice(["0", "1", "controller", "disk", "disk"]),
                delay_s,
                DISK,
                may_complete=True,
            )
    return _of_frames(kind, rng) or _of_data(kind, rng)


def _of_frames(kind: str, rng: random.Random) -> Case | None:
    side, after, seed = (
        rng.choice(["controller", "0", "1"]),
        rng.randrange(8, 60),
        rng.randrange(1 << 30),
    )
    match kind:
        case "drop frame" | "corrupt frame":
            frames = Fault(kind.split()[0], side, after, seed=seed)
            return Case(kind, side, 0.0, f"{SILENT}|out of order|malformed", frames=frames)
        case "duplicate frame":
            return Case(
                kind, side, 0.0, "", may_complete=True, frames=Fault("duplicate", side, after)
            )
        case "delay frame":
            frames = Fault("delay", side, after, seconds=rng.uniform(0.2, 5.0))
            may_complete = frames.seconds < LOST_AFTER_S + 1
            return Case(kind, side, 0.0, SILENT, may_complete=may_complete, frames=frames)
        case "corrupt bytes":
            side = rng.choice("01")
            frames = Fault("bytes", side, rng.randrange(2_000, 8_000))
            return Case(
                kind, side, 0.0, rf"lost rank {side}|{SILENT}|connection closed", frames=frames
            )
    return None


def _of_data(kind: str, rng: random.Random) -> Case:
    # a busy machine takes seconds to build a model, or to start the processes of hooks anew
    patient = ("--run.deadline_s=120",)
    match kind:
        case "nan reward":
            return Case(
                kind,
                "0",
                0.0,
                r"no finite number",
                recipe="arithmetic",
                settings=("--reward=POISON:nan", *patient),
            )
        case "nan gradient":
            settings = ("--warmup_lr=1e30", "--trainer.clip_norm=0", "--warmup_steps=5")
            settings += patient
            return Case(
                kind,
                "0",
                0.0,
                r"the (loss|gradient) is not finite",
                recipe="arithmetic",
                settings=settings,
            )
        case "reward hangs":
            settings = ("--reward=POISON:hangs", "--hooks.deadline_s=1", *patient)
            return Case(
                kind,
                "0",
                0.0,
                r"prompt 5 .*took longer than 1 s",
                recipe="arithmetic",
                settings=settings,
            )
        case "reward never returns":
            settings = ("--reward=POISON:hangs", "--hooks.deadline_s=0", "--run.deadline_s=15")
            return Case(
                kind,
                "0",
                0.0,
                r"no answer from rank \d.* its wait for hooks or other ranks, in infer\.generate",
                recipe="arithmetic",
                settings=settings,
            )
        case "reward is skipped":
            settings = (
                f"--reward=POISON:{rng.choice(['hangs', 'raises', 'nan'])}",
                "--hooks.deadline_s=0.2",
            )
            settings += ("--hooks.on_error=fail", "--steps=20", *patient)
            return Case(
                kind, "0", 0.0, "", may_complete=True, recipe="arithmetic", settings=settings
            )
        case "reward raises":
            return Case(
                kind,
                "0",
                0.0,
                r"poisoned",
                recipe="arithmetic",
                settings=("--reward=POISON:raises", *patient),
            )
        case "kill rank in arithmetic":
            return Case(
                kind, "1", 6.0, LOST.format(rank=1), recipe="arithmetic", signal=signal.SIGKILL
            )
    raise ValueError(f"no fault called {kind}")


KINDS = (
    "kill rank",
    "kill one, restarts",
    "a rank exits with 0",
    "end one rank",
    "stop rank",
    "drop frame",
    "kill controller",
    "kill launcher",
    "duplicate frame",
    "full disk",
    "stop controller",
    "corrupt frame",
    "kill rank at start",
    "a rank exits with 0, restarts",
    "delay frame",
    "end launcher",
    "corrupt bytes",
    "end controller",
    "nan gradient",
    "nan reward",
    "reward hangs",
    "reward is skipped",
    "reward never returns",
    "reward raises",
    "kill rank in arithmetic",
)


def cases(seed: int, count: int) -> list[Case]:
    """Return `count` cases; every kind occurs before any occurs again."""
    drawn = []
    for i in range(count):
        case = draw(KINDS[i % len(KINDS)], rng := random.Random(f"{seed}:{i}"))
        drawn.append(replace(case, resumes=case.recipe == "toy" and rng.random() < 1 / 3))
    return drawn


def matches(case: Case, text: str) -> bool:
    return bool(re.search(case.expected, text))
