"""Choice of reward functions: those of a prompt's own, or else the run's, with their weights.

A rank opens all of them at once, with the other hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.signatures import part_name, reward_weights
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.rewards.names import canonical_name
from spmd_rl.types.prompts import Prompt, prompt_name


@dataclass(frozen=True)
class Graders:
    """Functions that grade a prompt's samples: weights by the functions' own names, and their
    numbers in the pool of hooks.
    """

    weights: dict[str, float]
    numbers: frozenset[int]


class GraderChoice:
    """Says which functions grade a prompt's samples.

    `names` are all that the pool has, in its order. `weights` are those of the run.
    """

    def __init__(self, names: Sequence[str], weights: Mapping[str, float]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._own = self._graders(weights)
        self._by_reward: dict[tuple[tuple[str, float], ...], Graders] = {}

    def of(self, prompt: Prompt) -> Graders:
        """Return who grades this prompt's samples.

        Raises: DataError for a function that the pool does not have.
        """
        if not prompt.reward:
            return self._own
        key = tuple(prompt.reward.items())
        if key not in self._by_reward:
            if missing := [name for name in prompt.reward if name not in self._numbers]:
                loaded = ", ".join(self._numbers) or "none"
                raise DataError(
                    f"{prompt_name(prompt.uid)} of {prompt.source or 'the data'}",
                    f"it names the reward {missing[0]!r}, but only these are loaded: {loaded}: "
                    "add it to hooks.extra_rewards",
                )
            self._by_reward[key] = self._graders(prompt.reward)
        return self._by_reward[key]

    def _graders(self, weights: Mapping[str, float]) -> Graders:
        numbers = frozenset(self._numbers[name] for name in weights)
        return Graders({part_name(name): weight for name, weight in weights.items()}, numbers)


def all_rewards(weights: Mapping[str, float], extra: Sequence[str]) -> list[str]:
    """Return the canonical names of the run's own reward functions, and of the others after them.

    Raises: ConfigError for two of one name, whose parts could not be told apart.
    """
    names = list(dict.fromkeys(map(canonical_name, [*weights, *extra])))
    parts = [part_name(name) for name in names]
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise ConfigError(
            f"two reward functions are called {twice[0]!r}: rename one, "
            "because each is a part of the reward under its own name"
        )
    return names


class OpenedHooks(NamedTuple):
    """The rewards of a rank with their weights, and the processes of its hooks if it has some."""

    pool: HookPool | None
    rewards: list[str]
    weights: dict[str, float]


def open_hooks(
    hooks: HookConfig,
    reward: str | dict[str, float],
    settings: dict[str, Any] | None,
    context: RoleContext,
    model: str,
) -> OpenedHooks:
    """Start the processes of the hooks; the first rank of a shard runs them for all."""
    if context.shard_rank:
        return OpenedHooks(None, [], {})
    weights = reward_weights(reward)
    rewards = all_rewards(weights, hooks.extra_rewards)
    has_some = bool(rewards or hooks.generate)
    pool = HookPool(hooks, rewards, settings, context.rank, model) if has_some else None
    return OpenedHooks(pool, rewards, weights)
