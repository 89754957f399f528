"""Client programs that play the game of the example, with OpenAI's own client or none."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

GUESSES = 3


async def game(number: int, ask: Callable[[list[Any]], Awaitable[str]]) -> float:
    """Return the reward of a game, as `HigherLower` gives it."""
    messages = [{"role": "user", "content": "1 to 7"}]
    for _ in range(GUESSES):
        guess = (await ask(messages)).strip()
        messages.append({"role": "assistant", "content": guess})
        if guess not in tuple("1234567"):
            return -0.5
        if int(guess) == number:
            return 1.0
        said = "higher" if int(guess) < number else "lower"
        messages.append({"role": "user", "content": said})
    return 0.0


async def with_openai(base_url: str, key: str, task: dict[str, Any]) -> float:
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:

        async def ask(messages: list[Any]) -> str:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=2
            )
            return answer.choices[0].message.content or ""

        return await game(int(task["meta"]["number"]), ask)


def posted(base_url: str, key: str, messages: list[Any]) -> str:
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        body,
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def play_alone(ask: Callable[[list[Any]], str], number: int) -> float:
    """Play a game without an event loop."""

    async def ask_at_once(messages: list[Any]) -> str:
        return ask(messages)

    coroutine = game(number, ask_at_once)
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return float(ended.value)
    raise AssertionError("the game waits for nothing")


def with_urllib(base_url: str, key: str, task: dict[str, Any]) -> float:
    return play_alone(lambda messages: posted(base_url, key, messages), int(task["meta"]["number"]))


def main() -> None:
    """Play as a command: client.py BASE_URL KEY TASK_FILE."""
    base_url, key, task_file = sys.argv[1:]
    assert os.environ["OPENAI_BASE_URL"] == base_url
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()
    task = json.loads(Path(task_file).read_text())
    Path("result.json").write_text(json.dumps({"reward": with_urllib(base_url, key, task)}))
    print("played", task["question"])


if __name__ == "__main__":
    main()
