"""Environments of the package skyrl-gym, unmodified: their own registry, rewards and tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd_rl.environments.environment import AgentReply, EpisodeResult, Observation, TextEnvironment
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.prompts import Prompt

PACKAGE = "skyrl-gym==0.4.0"
MAX_TURNS = "max_turns"


class SkyRLGym(TextEnvironment):
    """One environment of skyrl-gym.

    `name` is that of its registry, such as "gsm8k_multi_turn"; without one, each record names its
    own in the field "env_class". A record's other fields are the extras of the environment. Its
    answer is the ground truth of one that has no field "reward_spec". `args` are the environment's
    config. Its calls may block, so each runs in a thread.
    """

    def __init__(self, name: str, args: Mapping[str, Any], max_turns: int) -> None:
        self._name, self._args, self._max_turns = name, args, max_turns
        self._made: Any = None

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self._made = await asyncio.to_thread(self._make, prompt)
        messages = [dict(one) for one in prompt.chat["messages"]]
        shown, _ = await asyncio.to_thread(self._made.init, messages)
        return Observation(tuple(shown))

    async def step(self, reply: AgentReply) -> Observation:
        out = await asyncio.to_thread(self._made.step, reply.text)
        if out.get("postprocessed_action") not in (None, reply.text):
            raise EpisodeFailure(
                "environment",
                f"skyrl-gym's {self._name} rewrites what the policy said (postprocessed_action), "
                "which nothing can learn from",
            )
        return Observation(tuple(out["observations"]), bool(out["done"]), float(out["reward"]))

    async def score(self, episode: EpisodeResult) -> float | dict[str, float]:
        metrics = await asyncio.to_thread(self._made.get_metrics)
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (bool, int, float))
        }
        return {"reward": 0.0, **numbers}

    async def close(self) -> None:
        if self._made is not None:
            await asyncio.to_thread(self._made.close)

    def _make(self, prompt: Prompt) -> Any:
        gym = load_skyrl_gym()
        extras = dict(prompt.meta)
        name = str(extras.pop("env_class", "")) if not self._name else self._name
        if not name:
            raise EpisodeFailure(
                "environment", 'agent.name is empty, and the record has no field "env_class"'
            )
        self._name = name
        extras.setdefault("reward_spec", {"method": "rule", "ground_truth": prompt.answer})
        extras.setdefault("extra_info", {})
        extras.setdefault(MAX_TURNS, self._max_turns)
        return gym.make(name, env_config=_config(self._args), extras=extras)


def load_skyrl_gym() -> Any:
    """Import the package. Raises: ConfigError that says how to install it."""
    try:
        import skyrl_gym
        import skyrl_gym.envs.registration
    except ImportError as error:
        raise ConfigError(
            f"agent.kind = 'skyrl_gym' needs the package skyrl-gym: pip install {PACKAGE} ({error})"
        ) from error
    return skyrl_gym


def check_skyrl_gym(name: str) -> None:
    """Raise a ConfigError where the package, or the environment of this name, is missing."""
    gym = load_skyrl_gym()
    known = gym.envs.registration.registry
    if name and name not in known:
        listed = ", ".join(sorted(known))
        raise ConfigError(f"agent.name = {name!r}: skyrl-gym has {listed}")


def _config(args: Mapping[str, Any]) -> Any:
    """Return the arguments as the config object that these environments read."""
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(args))
