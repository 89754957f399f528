"""Writes the data of this example: sums of two numbers, as prompts with their answers.

    python -m examples.arithmetic.generate                      # the shipped files: 10+10= ...
    39+39= python -m examples.arithmetic.generate --low 100 --high 999 --num-prompts 20000 --out
    data/three_digits

`train.jsonl` and `eval.jsonl` share no prompt. `warmup.jsonl` holds what a careless teacher said to
the training prompts: right less than half of the time, else off by 1 or by 10. The warm-up imitates
it; reinforcement learning has to outgrow it. `pairs.jsonl` and `eval_pairs.jsonl` hold the right
answer to each prompt of either file beside a wrong one, for DPO and reward models.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

Pair = tuple[int, int]

SLIPS = (-10, -1, 1, 10)


def sums(low: int, high: int, num_prompts: int, rng: random.Random) -> list[Pair]:
    """`num_prompts` different pairs of numbers from low to high, in random order; 0 means every
    pair there is.
    """
    width = high - low + 1
    chosen = rng.sample(range(width * width), num_prompts or width * width)
    return [(low + index // width, low + index % width) for index in chosen]


def record(pair: Pair, answer: int) -> dict[str, str]:
    return {"prompt": f"{pair[0]}+{pair[1]}=", "answer": str(answer)}


def careless(pair: Pair, care: float, rng: random.Random) -> int:
    """The sum with probability `care`, else one slip away from it."""
    slip = 0 if rng.random() < care else rng.choice(SLIPS)
    return sum(pair) + slip


def preferences(pair: Pair) -> Iterator[dict[str, str]]:
    """Yield a record for each slip: the right answer is chosen, and the slip rejected."""
    prompt = record(pair, sum(pair))["prompt"]
    for slip in SLIPS:
        yield {"prompt": prompt, "chosen": str(sum(pair)), "rejected": str(sum(pair) + slip)}


def write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--low", type=int, default=10)
    parser.add_argument("--high", type=int, default=39)
    parser.add_argument("--num-prompts", type=int, default=0, help="0: every pair")
    parser.add_argument(
        "--held-out", type=float, default=0.1, help="share of the prompts kept for eval.jsonl"
    )
    parser.add_argument("--care", type=float, default=0.45, help="how often the teacher is right")
    parser.add_argument(
        "--demonstrations", type=int, default=4, help="warm-up answers to each training prompt"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    pairs = sums(args.low, args.high, args.num_prompts, rng)
    num_held_out = round(args.held_out * len(pairs))
    held_out, train = pairs[:num_held_out], pairs[num_held_out:]
    lessons = rng.sample(train * args.demonstrations, len(train) * args.demonstrations)

    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "eval.jsonl", (record(pair, sum(pair)) for pair in held_out))
    write(args.out / "train.jsonl", (record(pair, sum(pair)) for pair in train))
    write(
        args.out / "warmup.jsonl",
        (record(pair, careless(pair, args.care, rng)) for pair in lessons),
    )
    for name, prompts in {"pairs": train, "eval_pairs": held_out}.items():
        write(args.out / f"{name}.jsonl", (row for pair in prompts for row in preferences(pair)))


if __name__ == "__main__":
    main()
