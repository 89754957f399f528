"""Function of an agent: a client program that runs in the process of the episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spmd_rl.environments.client_agents import (
    MAX_NOTE,
    end_samples,
    rewarded,
    task_of,
)
from spmd_rl.environments.client_errors import after_error, names_of
from spmd_rl.environments.config import OnError
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.session import Session
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.hooks.load import load_function
from spmd_rl.hooks.results import preview
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

FORM = "agent(base_url, key, task), async or not"


class FunctionAgent:
    """Calls one function for each episode. One that is not async runs in a thread of its own.

    `num_threads` is the most that run at once.
    """

    def __init__(self, name: str, num_threads: int, on_error: OnError = "zero") -> None:
        self._function, self._on_error = load_agent_function(name), on_error
        self._threads = ThreadPoolExecutor(num_threads, "agent")

    async def play(self, ctx: HookContext, prompt: Prompt, session: Session) -> list[Sample]:
        """Run the function to its end, and return what it has drawn.

        A text that it returns is noted beside the sample as "result".
        Raises: EpisodeFailure of the kind "agent" for whatever it raises, but for an error that
        the policy has caused, if `on_error` says so.
        """
        given = session.base_url, session.key, task_of(prompt)
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(*given)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, self._function, *given)
        except (EpisodeFailure, asyncio.CancelledError):
            raise
        # a user's function may raise anything
        except Exception as error:  # noqa: BLE001
            failure = EpisodeFailure("agent", f"the agent raised {type(error).__name__}: {error}")
            told = session.samples(), failure, names_of(error), self._on_error
            return rewarded(after_error(*told, is_over=session.is_over), None)
        if isinstance(result, str):
            ctx.note("result", result[:MAX_NOTE])
        no_reward = f"the agent returned {preview(result)}, which is no reward"
        return end_samples(ctx, prompt, session, result, no_reward)


def load_agent_function(name: str) -> Callable[..., Any]:
    """Return the function of this name. Raises: ConfigError, also for its parameters."""
    function = load_function("agent.name", name)
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise ConfigError(f"agent.name {name!r}: expected {FORM} ({error})") from error
    return function
