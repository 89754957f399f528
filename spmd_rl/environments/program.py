"""AgentProgram: the program of episodes that the setting `agent` chooses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spmd_rl.environments.config import AgentConfig, agent_of
from spmd_rl.environments.environment import Environment
from spmd_rl.environments.make import environment_maker
from spmd_rl.environments.play import EpisodeLimits, play
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.program import Site
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class AgentProgram:
    """Plays the episodes of a process. The class of an environment is loaded once."""

    def __init__(self) -> None:
        self._cfg = AgentConfig()
        self._make: Callable[[], Environment]
        self._turn_tokens = 0

    async def open(self, site: Site) -> None:
        """Load what the settings name. Raises: ConfigError where it cannot be used."""
        self._cfg = agent_of(site.config)
        self._make = environment_maker(self._cfg)
        self._turn_tokens = int(site.config.get("sampling", {}).get("max_tokens", 0))

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
        """Play an episode, and return the samples of its agents, as `play.play` does."""
        limits = EpisodeLimits(self._cfg.max_turns, self._cfg.max_tokens_total, self._turn_tokens)
        rng = np.random.default_rng((ctx.seed, ctx.prompt_uid))
        return await play(self._make(), prompt, engine, limits, rng)

    async def close(self) -> None:
        """Nothing lives longer than an episode."""
