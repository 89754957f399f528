"""Games of the package textarena, unmodified: one player, self-play, or a policy and others."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd_rl.environments.environment import (
    END_OF_SEEDS,
    AgentReply,
    Observation,
    TextEnvironment,
    state_after,
)
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.hooks.load import load_function
from spmd_rl.types.prompts import Prompt

PACKAGE = "textarena==0.7.4"
OWN_ARGS = ("num_players", "opponent", "seat")


class TextArena(TextEnvironment):
    """One game of textarena.

    `name` is that of its registry, such as "KuhnPoker-v0". `args.num_players` says how many play,
    by default one. The policy plays them all, and each is an agent. With `args.opponent`, which
    names a function `opponent(text, rng)`, the policy plays one alone: `args.seat`, or one that is
    drawn for each prompt. The other arguments are the game's own. An agent sees the prompt's
    system messages and then the game.

    The games draw from the module `random`. Each has a state of it of its own here.
    """

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        own = {key: value for key, value in args.items() if key not in OWN_ARGS}
        self._num_players = int(args.get("num_players", 1))
        self._opponent = load_opponent(str(args.get("opponent", "")))
        self._seat = args.get("seat")
        self._random: Any = None
        with self._own_random():
            self._game = load_textarena().make(name, **own)
        self._texts: dict[int, str] = {}  # the last observation of each player, where it is a text
        self._seen: dict[int, bytes] = {}  # a digest of what each player has seen and said
        self._first: tuple[dict[str, Any], ...] = ()
        self._turn_of = 0

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self._rng = rng
        messages = prompt.chat["messages"]
        self._first = tuple(dict(one) for one in messages if one["role"] == "system")
        seat = int(rng.integers(self._num_players)) if self._seat is None else int(self._seat)
        self._learns = {seat} if self._opponent else set(range(self._num_players))
        with self._own_random():
            self._game.reset(self._num_players, seed=int(rng.integers(END_OF_SEEDS)))
        return self._next(is_done=False)

    async def step(self, reply: AgentReply) -> Observation:
        return self._next(self._act(reply.text))

    def _act(self, text: str) -> bool:
        """Let the player whose turn it is do something; return whether the game has ended."""
        self._note(self._turn_of, text)
        with self._own_random():
            is_done, _ = self._game.step(text)
        return bool(is_done)

    def _next(self, is_done: bool) -> Observation:
        """Let the opponent play until it is the policy's turn."""
        while not is_done:
            with self._own_random():
                self._turn_of, shown = self._game.get_observation()
            text = self._news(self._turn_of, shown)
            if self._turn_of in self._learns:
                return self._shown(text)
            is_done = self._act(self._said_by_opponent(text))
        with self._own_random():
            rewards, _ = self._game.close()
        rewards = {self._agent(player): float(one) for player, one in (rewards or {}).items()}
        return Observation(done=True, reward=rewards)

    def _shown(self, text: str) -> Observation:
        player = self._turn_of
        is_first = player not in self._seen
        self._note(player, text)
        message = {"role": "user", "content": text}
        return Observation(
            (*self._first, message) if is_first else (message,),
            state=self._seen[player],
            agent=self._agent(player),
        )

    def _news(self, player: int, shown: Any) -> str:
        """Return what the game tells a player that it has not told before.

        Some games tell everything in one text each time. Others list what is new.
        """
        if not isinstance(shown, str):
            return "\n".join(text for sender, text, _ in shown if sender != player)
        before, self._texts[player] = self._texts.get(player, ""), shown
        return shown.removeprefix(before).strip("\n")

    def _note(self, player: int, text: str) -> None:
        self._seen[player] = state_after(self._seen.get(player, b""), text)

    def _agent(self, player: int) -> str:
        return f"player {player}" if self._num_players > 1 else ""

    def _said_by_opponent(self, text: str) -> str:
        assert self._opponent is not None
        self._seen.setdefault(self._turn_of, b"")
        said = self._opponent(text, self._rng)
        if not isinstance(said, str):
            raise EpisodeFailure("environment", f"args.opponent returned no text: {said!r}")
        return said

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Run a call of the game with the game's own state of the module `random`."""
        before = random.getstate()
        if self._random is not None:
            random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)


def load_opponent(name: str) -> Callable[[str, np.random.Generator], str] | None:
    """Return the function that `args.opponent` names. Raises: ConfigError."""
    if not name:
        return None
    function = load_function("agent.args.opponent", name)
    if len(inspect.signature(function).parameters) != 2:
        raise ConfigError(f"agent.args.opponent {name!r}: expected opponent(text, rng)")
    return function


def load_textarena() -> Any:
    """Import the package. Raises: ConfigError that says how to install it."""
    try:
        import textarena
        import textarena.envs.registration
    except ImportError as error:
        raise ConfigError(
            f"agent.kind = 'textarena' needs the package textarena: pip install {PACKAGE} ({error})"
        ) from error
    return textarena


def check_textarena(name: str, args: Mapping[str, Any]) -> None:
    """Raise a ConfigError where the package, the game or the opponent is missing."""
    known = load_textarena().envs.registration.ENV_REGISTRY
    if name not in known:
        raise ConfigError(f"agent.name = {name!r}: textarena has no game of this name")
    load_opponent(str(args.get("opponent", "")))
