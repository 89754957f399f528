"""Kills fully asynchronous runs at random moments, resumes them, and accounts for every prompt.

    python -m tests.system.kill_sampler --kills 20 --seed 1

Two asynchronous runs never have the same samples, so a run is not compared with another. Its steps
must have learned from every prompt once, in order, but for those that were counted as rejected or
are still waiting at its end. And what a checkpoint held of a sample when the run went on from it
must be the beginning of the sample that was learned from. With over-sampling, prompts go back to
the data and are drawn anew, so that only the count of prompts is checked. With --save the table
goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ran_files import A_RUN
from benchmarks.record import counted, finish, measured
from benchmarks.table import Row
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.observe.samples_file import read_groups
from spmd_rl.rollout.sampler_file import SamplerState, read_state
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample
from tests.system.kill_resume import SMALL, Moment, Run

NUM_STEPS, NUM_PROMPTS = 8, 4
ASYNC = [
    "grpo_fully_async",
    "--nproc=2",
    *SMALL,
    f"--steps={NUM_STEPS}",
    f"--prompts_per_step={NUM_PROMPTS}",
    "--sampling.max_tokens=40",
    "--sampling.stop_ids=[20, 21, 22]",  # answers end at random
    "--run.keep_checkpoints=9",
]
MODES = {
    "every group": [],
    # a group of two answers of a token each often has equal rewards
    "rejecting": ["--algorithm=dapo", "--sampling.max_tokens=1", "--sampling.num_samples=2"],
    "over-sampling": ["--sampler.oversample=1.5", "--sampler.max_running=10"],
}
IN_ORDER = ("every group", "rejecting")
WHEN_SAVED = Moment(1, 0, within="step_000004/state.json")  # while later steps are being drawn
Key = tuple[int, int]  # the prompt's uid and the index of the sample


@dataclass
class Account:
    """What is known of the prompts of a run that went on until its end.

    `steps` are the uids that each step has learned from, and `samples` those samples. `waiting` are
    uids that the last checkpoint holds, of `num_drawn` in all. `held` are samples, perhaps
    unfinished ones, of the checkpoints that the run went on from.
    """

    steps: list[list[int]]
    num_drawn: int
    num_rejected: int
    waiting: list[int]
    samples: Mapping[Key, Sample]
    held: list[Sample] = field(default_factory=list)
    in_order: bool = True

    @property
    def learned(self) -> list[int]:
        return [uid for step in self.steps for uid in step]

    @property
    def repeated(self) -> int:
        known = self.learned + self.waiting
        return len(known) - len({*known})

    @property
    def lost(self) -> int:
        """The prompts that were neither learned from nor rejected, and do not wait either."""
        return self.num_drawn - len({*self.learned, *self.waiting}) - self.num_rejected

    @property
    def restored(self) -> list[bool]:
        """Whether each sample that was held is the beginning of the one that was learned from."""
        pairs = [
            (held, sample)
            for held in self.held
            if (sample := self.samples.get((held.prompt_uid, held.index))) is not None
        ]
        return [begins_with(sample, held) for held, sample in pairs]

    def problems(self) -> Iterator[str]:
        """Yield a clause for each thing that must not be."""
        if any(len(step) != NUM_PROMPTS for step in self.steps):
            yield f"steps learned from {[len(step) for step in self.steps]} prompts"
        if self.in_order and self.learned != sorted(self.learned):
            yield f"prompts are out of order: {self.learned}"
        if self.repeated:
            yield f"{self.repeated} prompts were repeated"
        if self.lost:
            yield f"{self.lost} prompts were lost"
        if not all(self.restored):
            yield f"{self.restored.count(False)} buffered samples were drawn anew"


def begins_with(sample: Sample, held: Sample) -> bool:
    """Whether a sample goes on from what was held of it, bit for bit."""
    size = len(held.tokens)
    return all(
        getattr(sample, name)[:size].tobytes() == getattr(held, name).tobytes()
        for name in ("tokens", "logprobs", "versions")
    )


def held_in(run: Run) -> list[Sample]:
    """Return the samples in the checkpoint from which a run will go on; [] if it has none."""
    state = newest_state(run)
    groups = [entry.group.samples if entry.group else entry.partial for entry in state.entries]
    return [sample for samples in groups for sample in samples if len(sample.tokens)]


def newest_state(run: Run) -> SamplerState:
    complete = list(Checkpoints(run.folder / "checkpoints", 9, 0).complete())
    return read_state(str(complete[-1] / "sampler")) if complete else SamplerState(0, [], [], {})


def account_of(run: Run, mode: str, held: list[Sample]) -> Account:
    """Return the account of a run that has ended."""
    state = newest_state(run)
    waiting = [
        prompt.uid for prompt in (*(entry.prompt for entry in state.entries), *state.leaving)
    ]
    in_order = mode in IN_ORDER
    steps = [read_groups(run.folder, step) for step in range(1, NUM_STEPS + 1)]
    groups: list[Group] = [group for step in steps for group in step]
    rows = read_metrics(run.folder / "metrics.jsonl")
    return Account(
        steps=[[group.prompt.uid for group in step] for step in steps],
        num_drawn=state.source["drawn"],
        num_rejected=int(sum(row["rollout/rejected"] for row in rows)),
        waiting=waiting + state.source["given_back"],
        samples={(one.prompt_uid, one.index): one for group in groups for one in group.samples},
        held=held if in_order else [],
        in_order=in_order,
    )


def play(folder: Path, mode: str, name: str, moments: Iterator[Moment]) -> tuple[int, Account]:
    """Kill a run at these moments, as far as it gets there, and let it end; return the kills."""
    run, held, num_killed = Run(folder, [*ASYNC, *MODES[mode]], name=name), [], 0
    for moment in moments:
        if not run.kill(moment):
            break
        num_killed += 1
        held += held_in(run)
    run.finish()
    return num_killed, account_of(run, mode, held)


def campaign(folder: Path, num_kills: int, seed: int) -> tuple[int, list[Account], list[str]]:
    """Kill runs until there were `num_kills`; return the kills, all accounts, and what is wrong.

    If every kill came before a checkpoint held a sample, another comes after one that does.
    """
    rng, modes = random.Random(seed), list(MODES)
    accounts: list[Account] = []
    found: list[str] = []
    num_killed, num_events = 0, 40
    while (is_random := num_killed < num_kills) or not any(one.restored for one in accounts):
        mode, name = modes[len(accounts) % len(modes)], f"r{len(accounts)}"
        num_moments = min(rng.randint(2, 5), max(num_kills - num_killed, 2))
        moments = (Moment.random(rng, num_events) for _ in range(num_moments))
        if not is_random:
            mode, moments = IN_ORDER[0], iter([WHEN_SAVED])
        kills, account = play(folder, mode, name, moments)
        num_killed += kills
        accounts.append(account)
        problems = list(account.problems())
        found += [f"{seed}, run {len(accounts)} ({mode}): {problem}" for problem in problems]
        print(
            f"{mode}: {kills} kills, {len(account.restored)} samples went on: "
            f"{'; '.join(problems) or 'every prompt once, in order'}",
            flush=True,
        )
    return num_killed, accounts, found


def rows_of(num_killed: int, accounts: list[Account]) -> list[Row]:
    """Return the table of a campaign."""
    restored = [one for account in accounts for one in account.restored]
    learned = sum(len(account.learned) for account in accounts)
    return [
        measured("kills at random moments of asynchronous runs", num_killed, "kills"),
        measured("prompts that were learned from", learned, "prompts"),
        measured("prompts lost", sum(one.lost for one in accounts), "prompts", at_most=0),
        measured("prompts repeated", sum(one.repeated for one in accounts), "prompts", at_most=0),
        counted("runs without a problem", [not list(account.problems()) for account in accounts]),
        counted("samples of checkpoints that went on, bit for bit", restored),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_killed, accounts, found = campaign(Path(folder), args.kills, args.seed)
    for problem in found:
        print(problem)
    rows = rows_of(num_killed, accounts)
    missed = finish(__file__, ["torch", "pyzmq"], rows, save=args.save, rooms=A_RUN)
    return int(bool(found) or missed)


if __name__ == "__main__":
    sys.exit(main())
