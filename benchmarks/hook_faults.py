"""Random faults in graders and episodes: each must fail its own sample, and leave all others alone.

A hundredth of either may be another failed sample instead. No wrong grade and no other tokens may
come of any.

    python -m benchmarks.hook_faults --faults 1000 --save

As many tasks without a fault run between them. A task of theirs that fails, or has another reward
or other tokens than it should, is a fault that was attributed wrongly. The engine is a function
here, whose tokens depend on the request alone.
"""

from __future__ import annotations

import argparse
import random
import re
import select
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faulty_hooks import ASYNC, EPISODE, PLAIN, is_slow, known, right_reward
from benchmarks.record import finish, measured
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import (
    EngineCall,
    EpisodeEnded,
    EpisodeTask,
    Event,
    Failed,
    SampleTask,
)
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData

HOOKS = str(Path(__file__).with_name("faulty_hooks.py"))
IN_FLIGHT = 24  # tasks at once


@dataclass(frozen=True)
class Case:
    """One task: its fault, "" for none, where that happens, and the sentence that has to say so."""

    uid: int
    place: str
    fault: str
    sentence: str

    @property
    def fails(self) -> bool:
        return self.sentence != ""


@dataclass
class Outcome:
    """What has come of all cases."""

    cases: list[Case]
    wrong: dict[int, str] = field(default_factory=dict)  # by uid: what is not as it should be
    num_used: int = 0  # of these: they have not failed, so that training would use them
    num_calls: Counter[str] = field(default_factory=Counter)  # of each function and prompt
    slowest_s: float = 0.0  # from a task's submission to its event

    @property
    def num_twice(self) -> int:
        """Functions that were called again for a prompt without a fault."""
        fine = {str(case.uid) for case in self.cases if not case.fault}
        return sum(number - 1 for key, number in self.num_calls.items() if key.split()[1] in fine)


def make_cases(num_faults: int, seed: int, *, slow_share: float) -> list[Case]:
    """Return cases with random faults, and as many without, in random order.

    `slow_share` of the faults end by a deadline only.
    """
    rng = random.Random(seed)
    cases = []
    for uid in range(2 * num_faults):
        place = rng.choice((PLAIN, ASYNC, EPISODE))
        if uid % 2:
            cases.append(Case(uid, place, "", ""))
            continue
        slow = rng.random() < slow_share
        faults = known(place)
        fault = rng.choice(sorted(name for name in faults if is_slow(name) == slow))
        cases.append(Case(uid, place, fault, faults[fault]))
    rng.shuffle(cases)
    return cases


def run(cases: list[Case], *, deadline_s: float, pool_type: type[HookPool] = HookPool) -> Outcome:
    """Run all cases in one pool, and compare what comes of each with what should."""
    outcome = Outcome(cases)
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as counts:
        cfg = HookConfig(
            generate=f"{HOOKS}:play", deadline_s=deadline_s, episode_deadline_s=deadline_s
        )
        with pool_type(
            cfg,
            [f"{HOOKS}:grade", f"{HOOKS}:judge"],
            {"counts": counts.name},
        ) as pool:
            _drive(pool, cases, outcome)
        outcome.num_calls = Counter(counts.read().splitlines())
    return outcome


def _drive(pool: HookPool, cases: list[Case], outcome: Outcome) -> None:
    waiting, running = list(reversed(cases)), dict[int, tuple[Case, float]]()
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            case = waiting.pop()
            running[pool.submit(_task(case))] = case, time.monotonic()
        for event in pool.poll():
            if isinstance(event, EngineCall):
                pool.reply(event.task_id, event.call_id, _turn(event))
                continue
            case, began_s = running.pop(event.task_id)
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began_s)
            if problem := _problem(case, event):
                outcome.wrong[case.uid] = problem
                outcome.num_used += not isinstance(event, Failed)
        if running and len(running) >= min(IN_FLIGHT, len(running) + len(waiting)):
            select.select(pool.filenos(), [], [], 0.2)


def _task(case: Case) -> SampleTask | EpisodeTask:
    meta = {"fault": case.fault, "place": case.place}
    prompt = Prompt(case.uid, np.array([1, 2], np.int32), text=f"prompt {case.uid}", meta=meta)
    info = CallInfo(seed=5)
    if case.place == EPISODE:
        return EpisodeTask(prompt, 0, 1, 1.0, info)
    none = np.zeros(3, np.int32)
    sample = Sample(case.uid, 0, none, np.zeros(3, np.float32), none, "completed", text="said")
    return SampleTask(prompt, sample, info)


def _turn(call: EngineCall) -> Turn:
    """Return what an engine would draw; it depends on what was drawn before."""
    tokens = (np.arange(4) + 7 * len(call.past) + int(call.past.tokens.sum())) % 97
    logprobs = -tokens.astype(np.float32) / 8
    return Turn(
        TokenData(tokens.astype(np.int32), logprobs, np.full(4, 3, np.int32)), f"turn {tokens[0]}"
    )


def _problem(case: Case, event: Event) -> str:
    """Return what is wrong with the event of a case; "" if nothing is."""
    if isinstance(event, Failed):
        fits = f"prompt {case.uid} " in event.where and re.search(case.sentence, event.problem)
        return "" if case.fails and fits else event.error
    if case.fails:
        return f"{case.fault} was not seen: {event}"
    if isinstance(event, EpisodeEnded):
        return "" if _drawn(event.samples) == _expected(case) else f"other tokens: {event}"
    rewards = {name: [grade.reward for grade in grades] for name, grades in event.grades.items()}
    right = [right_reward(case.uid)]
    return "" if rewards == {"grade": right, "judge": right} else f"other rewards: {event}"


def _drawn(samples: list[Sample]) -> list[Any]:
    return [(one.tokens.tolist(), one.logprobs.tolist(), one.mask.tolist()) for one in samples]


def _expected(case: Case) -> list[Any]:
    """Return what an episode without a fault leads to."""
    tokens, logprobs, mask = np.zeros(0, np.int32), np.zeros(0, np.float32), list[bool]()
    for _ in range(3):
        call = EngineCall(0, 0, 0, TokenData(tokens, logprobs, tokens), None, None)
        turn = _turn(call)
        seen = [ord(letter) for letter in f"seen {turn.text}"]
        tokens = np.concatenate([tokens, turn.tokens, np.array(seen, np.int32)])
        logprobs = np.concatenate([logprobs, turn.logprobs, np.zeros(len(seen), np.float32)])
        mask += [True] * len(turn.tokens) + [False] * len(seen)
    return [(tokens.tolist(), logprobs.tolist(), mask)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds of one call")
    parser.add_argument("--slow", type=float, default=0.2, help="share that a deadline ends")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    began_s = time.monotonic()
    cases = make_cases(options.faults, options.seed, slow_share=options.slow)
    outcome = run(cases, deadline_s=options.deadline)
    for uid, problem in outcome.wrong.items():
        case = next(case for case in cases if case.uid == uid)
        print(f"prompt {uid} ({case.fault or 'no fault'}, {case.place}): {problem[:400]}")
    faulty = [case for case in cases if case.fault]
    right = sum(case.uid not in outcome.wrong for case in faulty)
    unchanged = sum(not case.fault and case.uid not in outcome.wrong for case in cases)
    rows = [
        measured("faults attributed to their sample", right, "faults", at_least=0.99 * len(faulty)),
        measured(
            "samples without a fault that are as they should be",
            unchanged,
            "samples",
            at_least=0.99 * (len(cases) - len(faulty)),
        ),
        measured("wrong grades and tokens", outcome.num_used, "samples", at_most=0),
        measured("calls made again because of another's fault", outcome.num_twice, "calls"),
        measured("time of all", time.monotonic() - began_s, "s"),
    ]
    return finish(__file__, ("numpy", "msgspec"), rows, save=options.save, rooms=("hooks",))


if __name__ == "__main__":
    raise SystemExit(main())
