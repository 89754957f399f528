"""AgentProgram: the program of episodes that the setting `agent` chooses."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np

from spmd_rl.environments.client_agents import gateway_of
from spmd_rl.environments.config import AgentConfig, agent_of
from spmd_rl.environments.make import check_agent, client_agent, environment_maker
from spmd_rl.environments.play import EpisodeLimits, play
from spmd_rl.environments.verifiers import VerifiersProgram
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.program import EpisodeProgram, Site
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class AgentProgram:
    """Plays the episodes of a process, as the settings say. What they name is loaded once."""

    def __init__(self) -> None:
        self._program: EpisodeProgram

    async def open(self, site: Site) -> None:
        """Load what the settings name. Raises: ConfigError where it cannot be used."""
        cfg = agent_of(site.config)
        check_agent(cfg)
        self._program = _program_of(cfg)
        await self._program.open(site)

    async def play(
        self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine
    ) -> Sample | list[Sample]:
        """Play an episode, and return its samples. Raises: EpisodeFailure."""
        return await self._program.play(ctx, prompt, engine)

    async def close(self) -> None:
        """End what `open` has started."""
        await self._program.close()


def _program_of(cfg: AgentConfig) -> EpisodeProgram:
    if cfg.kind == "verifiers":
        return VerifiersProgram(cfg)
    return ClientProgram(cfg) if cfg.calls_over_http else EnvironmentProgram(cfg)


class EnvironmentProgram:
    """Plays episodes in an environment; each has an object of its own."""

    def __init__(self, cfg: AgentConfig) -> None:
        self._cfg, self._make = cfg, environment_maker(cfg)
        self._limits: EpisodeLimits

    async def open(self, site: Site) -> None:
        turn_tokens = int(site.config["sampling"]["max_tokens"])
        self._limits = EpisodeLimits(self._cfg.max_turns, self._cfg.max_tokens_total, turn_tokens)

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
        rng = np.random.default_rng((ctx.seed, ctx.prompt_uid))
        return await play(self._make(), prompt, engine, self._limits, rng)

    async def close(self) -> None:
        """Nothing lives longer than an episode."""


class ClientProgram:
    """Plays episodes whose agents call the policy over HTTP: each has a session of the gateway."""

    def __init__(self, cfg: AgentConfig) -> None:
        self._cfg = cfg
        self._stack = AsyncExitStack()

    async def open(self, site: Site) -> None:
        """Start the gateway. Raises: ConfigError where its packages are missing."""
        num_threads = int(site.config["hooks"]["concurrency"])
        self._agent = client_agent(self._cfg, num_threads)
        self._gateway = await self._stack.enter_async_context(gateway_of(self._cfg, site))

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
        session = self._gateway.open(ctx, prompt, engine, max_turns=self._cfg.max_turns)
        try:
            return await self._agent.play(ctx, prompt, session)
        finally:
            session.close()

    async def close(self) -> None:
        await self._stack.aclose()
