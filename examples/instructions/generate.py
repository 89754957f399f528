"""Writes the prompts of this example: requests, each with instructions that can be checked.

    python -m examples.instructions.generate

A record has the keys of IFEval, which the grader `ifeval` reads. `train.jsonl` has one instruction
a prompt, and `train_two.jsonl` two or three. They go to runs/instructions_data. The prompts of the
evaluations are about subjects that no training prompt has: `eval.jsonl` with one instruction of a
trained kind, `eval_kinds.jsonl` with one of a kind that is never trained, and `eval_two.jsonl` with
two or three. These are small, and are here already.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.instructions.kinds import (
    HELD_OUT,
    PAIRS_AND_TRIPLES,
    TRAINING,
    Instruction,
    Kind,
    instruction,
)
from examples.instructions.topics import request

Record = dict[str, Any]
ORDERS: tuple[Callable[[str, str], str], ...] = (
    lambda asked, told: f"{asked} {told}",
    lambda asked, told: f"{asked}\n\n{told}",
    lambda asked, told: f"{told} {asked}",
)
ONE_EACH = tuple((kind,) for kind in TRAINING)
ONE_NEW_EACH = tuple((kind,) for kind in HELD_OUT)


def records(
    kinds: Sequence[Sequence[Kind]],
    count: int,
    rng: random.Random,
    known: set[str],
    *,
    held_out: bool,
) -> list[Record]:
    """Return records with prompts that are not in `known`, which they join.

    Each has an instruction of every kind of one element of `kinds`, which take turns. `held_out`
    chooses the subjects that no training prompt has.
    """
    found: list[Record] = []
    while len(found) < count:
        chosen = kinds[len(found) % len(kinds)]
        told = [instruction(kind, rng) for kind in rng.sample(chosen, len(chosen))]
        one = record(request(rng, held_out=held_out), told, rng)
        text = one["prompt"][0]["content"]
        if text not in known:
            known.add(text)
            found.append(one)
    return found


def record(asked: str, told: Sequence[Instruction], rng: random.Random) -> Record:
    """Return a record of a request with its instructions."""
    content = rng.choice(ORDERS)(asked, " ".join(one.text for one in told))
    return {
        "prompt": [{"role": "user", "content": content}],
        "instruction_id_list": [one.kind for one in told],
        "kwargs": [one.arguments for one in told],
    }


def write(path: Path, rows: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-train", type=int, default=4000, help="prompts of each training file")
    parser.add_argument("--num-eval", type=int, default=140, help="prompts of each evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="of evaluations")
    parser.add_argument(
        "--train-out", type=Path, default=Path("runs/instructions_data"), help="of training files"
    )
    args = parser.parse_args()

    rng, known = random.Random(args.seed), set[str]()
    for name, kinds in (("eval", ONE_EACH), ("eval_kinds", ONE_NEW_EACH)):
        found = records(kinds, args.num_eval, rng, known, held_out=True)
        write(args.out / f"{name}.jsonl", found)
    found = records(PAIRS_AND_TRIPLES, args.num_eval, rng, known, held_out=True)
    write(args.out / "eval_two.jsonl", found)
    for name, kinds in (("train", ONE_EACH), ("train_two", PAIRS_AND_TRIPLES)):
        found = records(kinds, args.num_train, rng, known, held_out=False)
        write(args.train_out / f"{name}.jsonl", found)


if __name__ == "__main__":
    main()
