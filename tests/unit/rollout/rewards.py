"""Reward functions of the tests of the rollout role."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time

from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.transcript import Transcript
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def count_zeros(prompt: Prompt, sample: Sample) -> dict[str, float]:
    return {"reward": sample.text.count("0") / 10, "long": float(len(sample.tokens) > 5)}


def slow(prompt: Prompt, sample: Sample) -> float:
    time.sleep(0.02)
    return 1.0


def broken(prompt: Prompt, sample: Sample) -> float:
    return 1 / 0


def fails_on_odd(prompt: Prompt, sample: Sample) -> float:
    return 1 / (1 - sample.index % 2)


def hangs_on_one(prompt: Prompt, sample: Sample) -> float:
    return _hang(prompt, sample, 1)


def hangs_on_three(prompt: Prompt, sample: Sample) -> float:
    return _hang(prompt, sample, 3)


def _hang(prompt: Prompt, sample: Sample, num_poisoned: int) -> float:
    if prompt.uid == 1 and sample.index < num_poisoned:
        threading.Event().wait()
    return float(sample.index)


def rank_of_length(prompt: Prompt, samples: list[Sample]) -> list[float]:
    """A whole group: 0 for its shortest sample, 1 for the next, and so on."""
    order = sorted(range(len(samples)), key=lambda number: len(samples[number].tokens))
    return [float(order.index(number)) for number in range(len(samples))]


def noted(ctx: HookContext, prompt: Prompt, sample: Sample) -> float:
    ctx.note("grader", "v1")
    return 1.0


async def gives_rewards(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """Its first sample has a reward, its second one an error, and its third one neither."""
    transcript = Transcript(prompt)
    await engine.complete(transcript)
    told = [{"reward": 0.25, "parts": {"kind": 3.0}}, {"reward": 0.0, "metadata": {"error": "cut"}}]
    return transcript.sample().replace(**[*told, {}][ctx.sample_index])


async def two_contexts(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    """One transcript after the prompt, and one after other tokens, which is watched."""
    plain, own = Transcript(prompt), Transcript(prompt, await engine.encode("7+77="))
    shown: list[list[int]] = []
    await asyncio.gather(engine.complete(plain), engine.complete(own, on_tokens=shown.append))
    ctx.emit("runs", len(shown))
    samples = [plain.sample(), own.sample()]
    assert [token for run in shown for token in run] == samples[1].tokens.tolist()
    return samples


async def hangs_up(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """A long turn is given up at its first token, and a short one is drawn after it."""
    transcript, began = Transcript(prompt), asyncio.Event()
    turn = asyncio.ensure_future(
        engine.complete(transcript, max_tokens=100, on_tokens=lambda _: began.set())
    )
    await began.wait()
    turn.cancel()
    await asyncio.wait([turn])
    await engine.complete(transcript, max_tokens=2)
    return transcript.sample()


async def three_turns(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """Its tool gives another answer each time that it is called."""
    transcript = Transcript(prompt)
    for number in range(3):
        await engine.complete(transcript, on_tokens=lambda _: None)
        seen = await ctx.once(f"tool {number}", lambda: _drawn_at_random(9))
        transcript.observe(await engine.encode(str(seen)))
    await engine.complete(transcript)
    return transcript.sample()


async def told_turns(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """Four turns, between which it is told how many tokens there are."""
    transcript = Transcript(prompt)
    for _ in range(3):
        await engine.complete(transcript)
        transcript.observe(await engine.encode(str(transcript.num_tokens)))
    await engine.complete(transcript)
    return transcript.sample()


async def turns_at_once(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    """Two conversations at the same time."""
    both = Transcript(prompt), Transcript(prompt, await engine.encode("7+77="))
    await asyncio.gather(*map(engine.complete, both))
    return [one.sample() for one in both]


async def second_alone(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """Only the second conversation makes a sample; that of an odd number is four times as long."""
    first, second = Transcript(prompt), Transcript(prompt, await engine.encode("7+77="))
    await engine.complete(first, max_tokens=1)
    await engine.complete(second, max_tokens=4 if ctx.sample_index % 2 == 0 else 16)
    return second.sample()


async def _drawn_at_random(below: int) -> int:
    return secrets.randbelow(below)


async def two_turns(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    await engine.complete(transcript, max_tokens=4)
    transcript.observe(await engine.encode("77"))
    await engine.complete(transcript)
    ctx.emit("turns", 2)
    ctx.note("tool", "77")
    return transcript.sample()
