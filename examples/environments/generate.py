"""Writes the data of this example: numbers to be found, and games of a teacher who only guesses.

python -m examples.environments.generate
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PROMPT = "1 to 7"


def game(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a game whose guesses are drawn at random."""
    number = rng.randint(1, 7)
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(3):
        guess = rng.randint(1, 7)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        said = "higher" if guess < number else "lower"
        messages.append({"role": "user", "content": said})
    return messages[:-1] if messages[-1]["role"] == "user" else messages


def write(path: Path, records: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    rng = random.Random(0)
    write(HERE / "train.jsonl", ({"prompt": PROMPT, "answer": str(n)} for n in range(1, 8)))
    write(HERE / "warmup.jsonl", ({"messages": game(rng)} for _ in range(500)))


if __name__ == "__main__":
    main()
