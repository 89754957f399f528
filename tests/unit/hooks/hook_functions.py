"""Hooks for the tests of the pool."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.errors import SpmdError
from spmd_rl.hooks.child.episode_engine import EpisodeEngine, RefusedTurn
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.hooks.program import Site
from spmd_rl.hooks.transcript import Transcript
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def length(prompt: Prompt, sample: Sample) -> float:
    return float(len(sample.text))


def process(prompt: Prompt, sample: Sample) -> float:
    """The process that graded, and the number of its calls."""
    process.calls = getattr(process, "calls", 0) + 1  # type: ignore[attr-defined]
    return {"reward": os.getpid(), "calls": process.calls}  # type: ignore[return-value, attr-defined]


def told(ctx: HookContext, prompt: Prompt, sample: Sample) -> dict[str, float]:
    """What the context says."""
    ctx.emit("length", len(sample.text))
    if len(sample.text) > 1:
        ctx.note("first", sample.text[0])
    return {
        "reward": ctx.config["scale"],
        "step": ctx.step,
        "version": ctx.version,
        "evaluation": ctx.evaluation,
        "random": ctx.rng.random(),
    }


def ranks(prompt: Prompt, samples: list[Sample]) -> list[float]:
    """The place of each sample by its length, from the shortest."""
    return [float(place) for place in np.argsort([len(sample.text) for sample in samples])]


async def slow_ranks(ctx: HookContext, prompt: Prompt, samples: list[Sample]) -> list[float]:
    await asyncio.sleep(0)
    ctx.emit("size", len(samples))
    return ranks(prompt, samples)


async def judge(prompt: Prompt, sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.text))


async def meet(prompt: Prompt, sample: Sample) -> float:
    """Ends once as many calls as the sample's text says run at once in this process."""
    meet.running = getattr(meet, "running", 0) + 1  # type: ignore[attr-defined]
    while meet.running < int(sample.text):  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
    return 1.0


def sleepy(prompt: Prompt, sample: Sample) -> float:
    time.sleep(float(sample.text))
    return os.getpid()


def meets_another(prompt: Prompt, sample: Sample) -> float:
    """Wait until a second process has come to the folder that the text names."""
    folder = Path(sample.text)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return os.getpid()


def say(prompt: Prompt, sample: Sample) -> float:
    print("said by a hook")
    print("and on stderr", file=sys.stderr)
    return 1.0


def modules(prompt: Prompt, sample: Sample) -> float:
    """1 if a heavy module is imported, which no hook has asked for."""
    return float(bool({"torch", "transformers", "zmq"} & sys.modules.keys()))


def environment(prompt: Prompt, sample: Sample) -> float:
    return float(any(name in os.environ for name in ("RANK", "MASTER_ADDR", "WORLD_SIZE")))


def writes(prompt: Prompt, sample: Sample) -> float:
    """Changes what it must not: `sample.text` says which array."""
    part, name = sample.text.split(".")
    getattr({"prompt": prompt, "sample": sample}[part], name)[:] = 0
    return 1.0


def forks(prompt: Prompt, sample: Sample) -> float:
    """Return the process that it forks, whose session is its own, so that no group is killed."""
    if pid := os.fork():
        return float(pid)
    os.setsid()
    time.sleep(1e6)
    return 0.0


def fails(prompt: Prompt, sample: Sample) -> Any:
    """Fails for the sample whose text says how."""
    if sample.text == "exit":
        os._exit(3)
    if sample.text == "raise":
        raise KeyError("gold")
    if sample.text == "hang":
        time.sleep(1e6)
    return float(len(sample.text))


async def async_fails(prompt: Prompt, sample: Sample) -> Any:
    await asyncio.sleep(0.01)
    return fails(prompt, sample)


async def play(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Any:
    """An episode as the text of its prompt says."""
    return await globals()[prompt.text](ctx, prompt, engine)


async def two_turns(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    first = await engine.complete(transcript, max_tokens=5, stop="</call>")
    transcript.observe(await engine.encode(f"={first.text}"))
    await engine.complete(transcript)
    ctx.emit("turns", 2)
    return transcript.sample()


async def two_agents(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    one, other = Transcript(prompt), Transcript(prompt)
    await asyncio.gather(engine.complete(one), engine.complete(other))
    return [one.sample(), other.sample("truncated")]


async def busy_transcript(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    await asyncio.gather(engine.complete(transcript), engine.complete(transcript))
    return transcript.sample()


async def own_context(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    plain, own = Transcript(prompt), Transcript(prompt, [60, 61, 62])
    await engine.complete(plain)
    await engine.complete(own, stop_ids=[5])
    return [plain.sample(), own.sample()]


async def watches(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript, shown = Transcript(prompt), list[list[int]]()
    turn = await engine.complete(transcript, on_tokens=shown.append)
    assert [token for run in shown for token in run] == turn.tokens.tolist()
    ctx.emit("runs", len(shown))
    return transcript.sample()


async def gives_up(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """One turn is cancelled by its engine, the other with its task."""
    first, second = Transcript(prompt), Transcript(prompt)
    waiting = asyncio.ensure_future(engine.complete(first))
    await asyncio.sleep(0)
    engine.cancel(first)
    try:
        await waiting
    except SpmdError as error:
        ctx.note("first", str(error))
    other = asyncio.ensure_future(engine.complete(second))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.wait([other])
    await engine.complete(first, max_tokens=3)
    return first.sample()


async def tool_breaks(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    raise EpisodeFailure("tool", "no answer from the search index")


class Counted:
    """A program: it counts its episodes, and writes down that it was closed."""

    async def open(self, site: Site) -> None:
        self.site, self.num_played = site, 0
        self.ticks = asyncio.ensure_future(self.tick())

    async def tick(self) -> None:
        """Run outside of any episode."""
        while True:
            await asyncio.sleep(3600)

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
        self.num_played = number = self.num_played + 1
        assert not self.ticks.done()
        transcript = Transcript(prompt)
        await engine.complete(transcript)
        ctx.emit("played", number)
        ctx.note("site", f"{self.site.rank} {self.site.texts.encode('ab')}")
        return transcript.sample()

    async def close(self) -> None:
        self.ticks.cancel()
        Path(self.site.config["closed"]).write_text(f"{self.num_played}")


class CannotOpen(Counted):
    async def open(self, site: Site) -> None:
        raise OSError("the port is taken")


class HasNoClose:
    async def open(self, site: Site) -> None: ...

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> None: ...


async def is_refused(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    await engine.complete(transcript)
    try:
        await engine.complete(transcript)
    except RefusedTurn as error:
        ctx.emit(str(error), 1)
    return transcript.sample()


async def waits(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    await engine.complete(transcript)
    return transcript.sample()


async def sleeps(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def holds_the_loop(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    threading.Event().wait()
    raise AssertionError("nobody sets it")


async def breaks_once(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    """Ends the process of all, after a turn."""
    await engine.complete(Transcript(prompt))
    os._exit(4)


async def returns_text(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> str:
    return "no sample"


async def returns_nothing(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    return []


async def returns_early(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    return Transcript(prompt).sample()


async def returns_twice(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
    transcript = Transcript(prompt)
    await engine.complete(transcript)
    return [transcript.sample(), transcript.sample()]


async def returns_lock(ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> Sample:
    transcript = Transcript(prompt)
    await engine.complete(transcript)
    return transcript.sample().replace(metadata={"lock": asyncio.Lock()})
