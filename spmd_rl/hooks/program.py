"""Program of episodes: what `hooks.generate` names, opened once in each process that plays them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EpisodeSamples = Sample | list[Sample]
PROGRAM_FORM = (
    "a class without arguments that has async open(site), async play(ctx, prompt, engine) and "
    "async close()"
)


@dataclass(frozen=True)
class Site:
    """What a process of episodes has for all of them.

    `config` is the recipe's config as plain nested data, `rank` is that of the worker that the
    process serves, and `model` is the folder of the run's model.
    """

    config: Mapping[str, Any]
    rank: int
    model: str
    texts: EpisodeTexts

    @property
    def context_tokens(self) -> int:
        """The most tokens that a sequence of the model has."""
        return self.texts.context_tokens


class EpisodeProgram(Protocol):
    """A class that `hooks.generate` may name. Each process of episodes makes one object of it."""

    async def open(self, site: Site) -> None:
        """Start what lives outside of any episode, such as a server. No episode begins before.

        An error ends the run.
        """
        ...

    async def play(self, ctx: HookContext, prompt: Prompt, engine: Any) -> EpisodeSamples:
        """Play one episode, beside others in the same event loop. `engine` is an EpisodeEngine."""
        ...

    async def close(self) -> None:
        """End what `open` has started, within a few seconds, as the process ends.

        A process that was killed, or ended otherwise, has not called it. What it has started ends
        all the same.
        """
        ...


class FunctionProgram:
    """The program of one async function, which is all that most episodes need."""

    def __init__(self, play: Callable[..., Any]) -> None:
        self.play = play

    async def open(self, site: Site) -> None:
        return

    async def close(self) -> None:
        return


def is_program(named: Any) -> bool:
    """Return whether an object is a class with the methods of EpisodeProgram."""
    names = ("open", "play", "close")
    methods = [getattr(named, name, None) for name in names]
    return isinstance(named, type) and all(map(inspect.iscoroutinefunction, methods))
