"""Writes the data of this example: terms such as 37*48+12, and the turns of a careless teacher.

    python -m examples.calculator.generate

`train.jsonl` holds prompts and answers. `warmup.jsonl` holds what the teacher writes in each turn
of other terms, after what it has written and seen before. It makes mistakes: it miscopies a digit,
or answers without the calculator. Reinforcement learning has to outgrow them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.calculator.hooks import calculate

FACTORS = range(32, 100)  # products have four digits
ADDENDS = range(10, 100)


def term(rng: random.Random) -> tuple[str, str]:
    """Return a product of two numbers, and a sum or difference that ends it: 37*48, +12."""
    product = f"{rng.choice(FACTORS)}*{rng.choice(FACTORS)}"
    return product, f"{rng.choice('+-')}{rng.choice(ADDENDS)}"


def slip(text: str, chance: float, rng: random.Random) -> str:
    """Return the text, with one of its digits replaced at this chance."""
    if rng.random() >= chance:
        return text
    place = rng.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    return text[:place] + rng.choice("0123456789") + text[place + 1 :]


def turns(product: str, rest: str, care: float, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield the teacher's turns on a term: two calls and the answer, or an answer at once."""
    prompt = f"{product}{rest}="
    if rng.random() >= care:
        yield {"prompt": prompt, "answer": slip(calculate(product), 1.0, rng)}
        return
    for_call = product
    for _ in range(2):
        call = slip(for_call, 1 - care, rng)
        yield {"prompt": prompt, "answer": f"[{call}]"}
        result = calculate(call)
        prompt += f"[{call}]={result};"
        for_call = result + rest
    yield {"prompt": prompt, "answer": slip(result, 1 - care, rng)}


def write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=900)
    parser.add_argument("--num-lessons", type=int, default=900, help="terms that the teacher shows")
    parser.add_argument(
        "--care", type=float, default=0.8, help="chance that a turn of the teacher is right"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    terms: dict[tuple[str, str], None] = {}
    while len(terms) < args.num_prompts + args.num_lessons:
        terms[term(rng)] = None
    train, lessons = [*terms][: args.num_prompts], [*terms][args.num_prompts :]
    args.out.mkdir(parents=True, exist_ok=True)
    write(
        args.out / "train.jsonl",
        (
            {"prompt": f"{product}{rest}=", "answer": calculate(calculate(product) + rest)}
            for product, rest in train
        ),
    )
    taught = [row for one in lessons for row in turns(*one, args.care, rng)]
    write(args.out / "warmup.jsonl", rng.sample(taught, len(taught)))


if __name__ == "__main__":
    main()
