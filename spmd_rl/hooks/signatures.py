"""Signatures of hooks: each kind has its own, and a wrong one is answered with the right one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.load import load_function
from spmd_rl.rewards.names import canonical_name

CONTEXT, WHOLE_GROUP = "ctx", "samples"  # names of parameters that say how a function is called
REWARD_FORMS = (
    "reward(prompt, sample) or reward(ctx, prompt, sample) for one sample, or "
    "reward(prompt, samples) or reward(ctx, prompt, samples) for a whole group"
)
GENERATE_FORM = "async generate(ctx, prompt, engine)"
KEEP_GROUP_FORM = "keep_group(ctx, group)"
PICK_SOURCES_FORM = "pick_sources(step, sources)"


class RewardForm(msgspec.Struct, frozen=True):
    """How a reward function is called."""

    takes_context: bool
    whole_group: bool
    is_async: bool


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, its name as a part of the reward, and how it is called."""

    name: str
    function: Callable[..., Any]
    form: RewardForm


def load_reward(name: str) -> RewardFunction:
    """Return the reward function of this name. Raises: ConfigError, also for its signature."""
    function = load_function("reward", name)
    return RewardFunction(part_name(name), function, reward_form(name, function))


def load_generate(name: str) -> Callable[..., Any]:
    """Return the episode function of this name. Raises: ConfigError, also for its signature."""
    function = load_function("hooks.generate", name)
    if not _is_async(function) or not _takes(function, 3):
        raise _wrong("hooks.generate", name, function, GENERATE_FORM)
    return function


def load_keep_group(name: str) -> Callable[..., Any]:
    """Return the `keep_group` of this name. Raises: ConfigError, also for its signature."""
    function = load_function("hooks.keep_group", name)
    if _is_async(function) or not _takes(function, 2):
        raise _wrong("hooks.keep_group", name, function, KEEP_GROUP_FORM)
    return function


def load_pick_sources(name: str) -> Callable[[int, list[str]], Mapping[str, float]]:
    """Return the `pick_sources` of this name. Raises: ConfigError, also for its signature."""
    function = load_function("hooks.pick_sources", name)
    if _is_async(function) or not _takes(function, 2):
        raise _wrong("hooks.pick_sources", name, function, PICK_SOURCES_FORM)
    return function


def check_hooks(cfg: HookConfig) -> None:
    """Import the hooks that a config names. Raises: ConfigError when one cannot be used."""
    if cfg.generate:
        load_generate(cfg.generate)
    if cfg.keep_group:
        load_keep_group(cfg.keep_group)
    if cfg.pick_sources:
        load_pick_sources(cfg.pick_sources)
    for name in cfg.extra_rewards:
        load_reward(name)


def part_name(name: str) -> str:
    """Return the name of the function itself, under which it is a part of the reward."""
    return name.rpartition(":")[2]


def reward_weights(reward: str | Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each reward function by its canonical name; without one, an empty dict.

    Raises: ConfigError for two functions of one name, whose parts could not be told apart, and for
    a weight that is no number.
    """
    if isinstance(reward, str):
        return {canonical_name(reward): 1.0} if reward else {}
    for name, weight in reward.items():
        require(math.isfinite(weight), f"reward.{name}", weight, "a finite number")
    parts = [part_name(name) for name in reward]
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise ConfigError(
            f"reward: two functions are called {twice[0]!r}: rename one, "
            "because each is a part of the reward under its own name"
        )
    return {canonical_name(name): weight for name, weight in reward.items()}


def reward_form(name: str, function: Callable[..., Any]) -> RewardForm:
    """Return how the function is called. Raises: ConfigError with the forms that it may have."""
    parameters = list(inspect.signature(function).parameters)
    takes_context = parameters[:1] == [CONTEXT]
    if not _takes(function, 3 if takes_context else 2):
        raise _wrong("reward", name, function, REWARD_FORMS)
    whole_group = parameters[1 + takes_context : 2 + takes_context] == [WHOLE_GROUP]
    return RewardForm(takes_context, whole_group, _is_async(function))


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  of an object that is called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    return True


def _wrong(kind: str, name: str, function: Callable[..., Any], form: str) -> ConfigError:
    asynchronous = "async " if _is_async(function) else ""
    return ConfigError(
        f"{kind} {name!r}: it is {asynchronous}{part_name(name)}{inspect.signature(function)}: "
        f"write it as {form}"
    )
