"""Play of an episode: the policy replies to an environment until it ends, or a limit is reached."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from spmd_rl.environments.environment import Ending, Environment, EpisodeResult, Observation
from spmd_rl.environments.player import Player, begin_conversation
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.failures import EpisodeFailure, blaming
from spmd_rl.hooks.results import BadResult, as_grade
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may be: its turns, and the tokens that the policy draws in all of them.

    `turn_tokens` are those of one turn. 0 tokens: no limit of this kind.
    """

    max_turns: int
    total_tokens: int = 0
    turn_tokens: int = 0

    def of_turn(self, num_drawn: int) -> int | None:
        """Return the most tokens of the next turn; None for the limit of the recipe."""
        left = self.total_tokens - num_drawn
        if not self.total_tokens or (self.turn_tokens and left >= self.turn_tokens):
            return None
        return left


async def play(
    environment: Environment,
    prompt: Prompt,
    engine: EpisodeEngine,
    limits: EpisodeLimits,
    rng: np.random.Generator,
) -> list[Sample]:
    """Let the policy play an episode, and return the samples of all its agents.

    Every sample has the reward of its agent: those of its turns, and the environment's score.
    Blocks: until the episode has ended; the environment is then closed, also after an error.
    Raises: EpisodeFailure for what the environment raises, and for a prompt that leaves no room.
    """
    episode = _Episode(environment, prompt, engine, limits)
    try:
        return await episode.play(rng)
    finally:
        await _of_environment("close", environment.close())


class _Episode:
    def __init__(
        self, environment: Environment, prompt: Prompt, engine: EpisodeEngine, limits: EpisodeLimits
    ) -> None:
        self._environment, self._prompt = environment, prompt
        self._engine, self._limits = engine, limits
        self._players: dict[str, Player] = {}
        self._num_turns = self._num_drawn = 0

    async def play(self, rng: np.random.Generator) -> list[Sample]:
        ending = await self._run(rng)
        if not self._num_drawn:
            raise EpisodeFailure("context", "the policy could say nothing: the context is full")
        played = EpisodeResult(
            self._prompt,
            {name: player.messages for name, player in self._players.items()},
            {name: player.reward for name, player in self._players.items()},
            self._num_turns,
            ending,
        )
        score = await _of_environment("score", self._environment.score(played))
        try:
            grade = as_grade(score)
        except BadResult as problem:
            raise EpisodeFailure("environment", f"score {problem}") from problem
        parts = {name: part for name, part in grade.parts.items() if name != "reward"}
        players = self._players.values()
        return [one for player in players for one in player.samples(grade.reward, parts)]

    async def _run(self, rng: np.random.Generator) -> Ending:
        """Play until the episode ends, and return why it did."""
        seen = await _of_environment("reset", self._environment.reset(self._prompt, rng))
        while not seen.done:
            if self._num_turns == self._limits.max_turns:
                return "turns"
            max_tokens = self._limits.of_turn(self._num_drawn)
            if max_tokens == 0:
                return "tokens"
            player = await self._player(seen)
            reply, num_tokens = await player.reply(self._engine, seen.state, max_tokens)
            if not num_tokens:
                return "context"
            self._num_turns += 1
            self._num_drawn += num_tokens
            seen = await _of_environment("step", self._environment.step(reply))
            self._reward(reply.agent, seen)
        for name, player in self._players.items():
            if name == seen.agent:
                player.see(seen.messages)
        return "done"

    async def _player(self, seen: Observation) -> Player:
        """Return the agent whose turn it is, which has seen what the environment shows."""
        player = self._players.get(seen.agent)
        if player is not None:
            player.see(seen.messages)
            return player
        conversation = await begin_conversation(self._prompt, seen.messages, self._engine)
        player = self._players[seen.agent] = Player(seen.agent, conversation)
        return player

    def _reward(self, agent: str, seen: Observation) -> None:
        """Give the rewards of an observation to the agents that have played."""
        rewards = seen.reward if isinstance(seen.reward, Mapping) else {agent: seen.reward}
        for name, reward in rewards.items():
            if not math.isfinite(reward):
                raise EpisodeFailure("environment", f"step gave {name!r} the reward {reward}")
            if name in self._players:
                self._players[name].rewarded(float(reward))


async def _of_environment(name: str, call: Awaitable[T]) -> T:
    """Wait for a call of an environment. Raises: EpisodeFailure for whatever it raises."""
    with blaming("environment", name):
        return await call
