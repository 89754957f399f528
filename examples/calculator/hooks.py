"""Hooks of this example: an episode in which the model may call a calculator, and its reward."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import spmd_rl as rl

MAX_TURNS = 4
CALL = re.compile(r"\[(.*)\]", re.DOTALL)
EXPRESSION = re.compile(r"([0-9]{1,9})([-+*])([0-9]{1,9})")
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def calculate(expression: str) -> str:
    """Return the result of one operation on two whole numbers; "?" for any other text."""
    found = EXPRESSION.fullmatch(expression)
    if found is None:
        return "?"
    left, sign, right = found.groups()
    return str(OPERATORS[sign](int(left), int(right)))


async def solve(ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine) -> rl.Sample:
    """Let the model write until it answers; after each `[37*48]`, show it `=1776;`."""
    transcript = rl.Transcript(prompt)
    for _ in range(MAX_TURNS):
        turn = await engine.complete(transcript, stop=["]"])
        call = CALL.fullmatch(turn.text)
        if call is None:
            break
        transcript.observe(await engine.encode(f"={calculate(call[1])};"))
    return transcript.sample()


def right(prompt: rl.Prompt, sample: rl.Sample) -> dict[str, float]:
    """1 when what follows the last result is exactly the answer, and the model ended there."""
    answer = sample.text.rpartition(";")[2]
    is_right = sample.status == "completed" and answer == prompt.answer
    return {"reward": float(is_right), "calls": float(sample.text.count("]="))}
