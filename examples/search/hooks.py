"""Hooks of this example: an episode in which the model may search a corpus, and its reward."""

from __future__ import annotations

import re
from functools import cache

import spmd_rl as rl
from examples.search.retriever import Retriever

MAX_TURNS = 4
SEARCH = re.compile(r"<search>(.*)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)


@cache
def retriever() -> Retriever:
    """Return the retriever of this process."""
    return Retriever.load()


async def solve(ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine) -> rl.Sample:
    """Let the model write until it answers; after each search, show it the document found."""
    transcript = rl.Transcript(prompt)
    for _ in range(MAX_TURNS):
        turn = await engine.complete(transcript, stop=["</search>", "</answer>"])
        search = SEARCH.fullmatch(turn.text)
        if search is None:
            break
        document = retriever().find(search[1])
        transcript.observe(await engine.encode(f"<doc>{document}</doc>"))
    return transcript.sample()


def right(prompt: rl.Prompt, sample: rl.Sample) -> dict[str, float]:
    """1 when what follows the last document is exactly the answer in its tags."""
    said = ANSWER.fullmatch(sample.text.rpartition("</doc>")[2])
    is_right = said is not None and said[1] == prompt.answer
    return {"reward": float(is_right), "searches": float(sample.text.count("</search>"))}
