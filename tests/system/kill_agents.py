"""Kills runs of agents at random moments, resumes them, and compares them with undisturbed runs.

    python -m tests.system.kill_agents --kills 50 --seed 1

An episode has two turns and a tool between them: in process, over HTTP, and in rounds, which carry
half-played episodes into the next step. Each run must end as one that nobody has killed: the same
tokens, log-probs and rewards of all steps, the same metrics, and the same weights. With --save the
table goes to benchmarks/results/.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.ran_files import A_RUN
from benchmarks.record import counted, finish, measured
from benchmarks.table import Row
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.observe.samples_file import read_groups
from tests.system.kill_resume import ROUNDS, Ended, Run, campaign, modes_parser

AGENT = Path(__file__).with_name("durable_agent.py")
IN_PROCESS, OVER_HTTP = (f"--hooks.generate={AGENT}:{name}" for name in ("solve", "SolveOverHttp"))
MODES = {
    "in process": ["grpo", "--nproc=1", IN_PROCESS],
    "over HTTP": ["grpo", "--nproc=1", OVER_HTTP],
    "in rounds": ["grpo", "--nproc=1", IN_PROCESS, *ROUNDS],
    "over HTTP in rounds": ["grpo", "--nproc=1", OVER_HTTP, *ROUNDS],
}
NUM_STEPS = 5


def steps_of(run: Run) -> list[list[tuple[int, int]]]:
    """Return (uid, index) of the samples that each step has learned from."""
    steps = (read_groups(run.folder, step) for step in range(1, NUM_STEPS + 1))
    return [
        [(group.prompt.uid, sample.index) for group in step for sample in group.samples]
        for step in steps
    ]


def num_lost_and_repeated(ended: Ended) -> tuple[int, int]:
    """Return the samples that a killed run has not learned from, and those that it has twice."""
    learned = Counter(one for step in steps_of(ended.run) for one in step)
    expected = {one for step in steps_of(ended.whole) for one in step}
    return len(expected - learned.keys()), sum(count - 1 for count in learned.values())


def num_older(run: Run) -> float:
    """Return how many tokens of a run were drawn by weights before those that learned from them."""
    rows = read_metrics(run.folder / "metrics.jsonl")
    return sum(row["version/older_share"] * row["onpolicy/drawn_tokens"] for row in rows)


def rows_of(all_ended: list[Ended]) -> list[Row]:
    """Return the table of a campaign."""
    accounts = [num_lost_and_repeated(ended) for ended in all_ended]
    lost, repeated = (sum(column) for column in zip(*accounts, strict=True))
    mismatched = sum(
        row["onpolicy/mismatched_tokens"]
        for ended in all_ended
        for row in read_metrics(ended.run.folder / "metrics.jsonl")
    )
    num_learned = sum(len(step) for ended in all_ended for step in steps_of(ended.run))
    carried = sum(num_older(ended.run) for ended in all_ended)
    return [
        measured("kills at random moments", sum(one.num_kills for one in all_ended), "kills"),
        measured("samples that were learned from", num_learned, "samples"),
        measured("samples lost", lost, "samples", at_most=0),
        measured("samples learned from twice", repeated, "samples", at_most=0),
        measured("unequal tokens", mismatched, "tokens", at_most=0),
        measured("tokens carried into a later step", round(carried), "tokens"),
        counted("runs equal to an undisturbed one", [not one.differences for one in all_ended]),
    ]


def main() -> int:
    parser = modes_parser(MODES)
    parser.description = __doc__
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    names = args.mode or list(MODES)
    with tempfile.TemporaryDirectory() as folder:
        runs = campaign(
            Path(folder), MODES, args.kills, args.seed, names, most_kills=8, look_s=0.01
        )
        ended = list(runs)
        rows = rows_of(ended)
    rooms = (*A_RUN, "gateway")
    return int(finish(__file__, ["torch", "pyzmq"], rows, save=args.save, rooms=rooms))


if __name__ == "__main__":
    sys.exit(main())
