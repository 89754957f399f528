"""Agents that misbehave: as an environment, as functions, and as a program.

The first of them that marks the folder `notes` of its record is the one that hangs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.environments.environment import AgentReply, Observation, TextEnvironment
from spmd_rl.types.prompts import Prompt


def is_first(folder: str) -> bool:
    """Whether nobody else has marked this folder before."""
    try:
        os.close(os.open(Path(folder) / "mark", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class HangsOnce(TextEnvironment):
    """Rewards any reply, but for one that it never takes."""

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self._folder = prompt.meta["notes"]
        return Observation()

    async def step(self, reply: AgentReply) -> Observation:
        if is_first(self._folder):
            await asyncio.Event().wait()
        return Observation(done=True, reward=float(len(reply.text)))


def ask(base_url: str, key: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """Return what the policy says."""
    body = json.dumps({"model": "policy", "messages": messages} | more).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        body,
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found["choices"][0]


def hangs_once(base_url: str, key: str, task: dict[str, Any]) -> float:
    """Reward any reply, but for one after which it waits in a thread."""
    said = ask(base_url, key, task["messages"])
    if is_first(task["meta"]["notes"]):
        threading.Event().wait()
    return float(len(said["message"]["content"] or ""))


class MaxTokens(Exception):
    """As clients raise for a reply that was cut."""


def raises(base_url: str, key: str, task: dict[str, Any]) -> float:
    """Raise for a reply that was cut; the first one raises before any reply is asked for."""
    if is_first(task["meta"]["notes"]):
        raise OSError("the tool is down")
    if ask(base_url, key, task["messages"])["finish_reason"] == "length":
        raise MaxTokens("the reply was cut")
    return 0.0


def main() -> None:
    """Play a function as a program."""
    task = json.loads(Path(sys.argv[1]).read_text())
    play = raises if "raises" in task["meta"] else hangs_once
    reward = play(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task)
    Path("result.json").write_text(json.dumps(reward))


if __name__ == "__main__":
    main()
