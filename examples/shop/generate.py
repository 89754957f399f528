"""Writes the data of this example: what customers ask, and the price list of each of them.

python -m examples.shop.generate
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRAINED = (
    "lamp chair table clock mirror carpet pillow blanket kettle teapot bowl spoon fork plate mug "
    "bucket broom ladder hammer saw nail rope candle lantern basket barrel wheel saddle boot glove "
    "scarf hat coat belt button needle thread ribbon comb brush soap towel sponge"
).split()
HELD_OUT = "violin trumpet flute harp piano bell kite ball puppet mask umbrella".split()
ASKED = (
    "What does a {} cost?",
    "How much is a {}?",
    "I want to buy a {}. How much is it?",
    "Tell me the price of a {}.",
    "My brother needs a {}. What would I pay for it?",
)


def questions(things: list[str], count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        on_sale = rng.sample(things, 6)
        prices = {thing: rng.randint(2, 99) for thing in on_sale}
        thing = on_sale[0]
        yield {
            "prompt": [{"role": "user", "content": rng.choice(ASKED).format(thing)}],
            "prices": prices,
            "things": [thing],
            "total": prices[thing],
        }


def write(path: Path, records: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    out, rng = parser.parse_args().out, random.Random(0)
    write(out / "train.jsonl", questions(TRAINED, 400, rng))
    write(out / "eval.jsonl", questions(HELD_OUT, 64, rng))


if __name__ == "__main__":
    main()
