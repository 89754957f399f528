"""Signatures of hooks: each kind has its own, and a wrong one is answered with the right one.

A hook gets its arguments by place, so parameters may have any names but those that say that
something else is expected: names of ours in another place, and names that rewards and episodes have
elsewhere, as in TRL, verl and slime.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.load import load_function
from spmd_rl.hooks.program import PROGRAM_FORM, EpisodeProgram, FunctionProgram, is_program
from spmd_rl.rewards.names import canonical_name

CONTEXT, WHOLE_GROUP = "ctx", "samples"  # names of parameters that say how a function is called
REWARD_FORMS = (
    "reward(prompt, sample) or reward(ctx, prompt, sample) for one sample, or "
    "reward(prompt, samples) or reward(ctx, prompt, samples) for a whole group; sample.text is "
    "what the model wrote, prompt.answer the record's answer, and prompt.meta its other fields"
)
GENERATE_FORM = "async generate(ctx, prompt, engine)"
EPISODE = (CONTEXT, "prompt", "engine")  # parameters of an episode function
KEEP_GROUP_FORM = "keep_group(ctx, group)"
PICK_SOURCES_FORM = "pick_sources(step, sources)"
# names of parameters with a meaning: ours, and those of hooks of other programs
OURS = {CONTEXT, WHOLE_GROUP, *EPISODE, "sample", "group", "step", "sources", "site"}
ELSEWHERE = set(
    "prompts completion completions completion_ids prompt_ids response responses output outputs "
    "input inputs text texts generation generations prediction predictions solution solutions "
    "solution_str solution_strs answer answers ground_truth ground_truths data_source data_sources "
    "extra_info extra_infos query queries question questions label labels reference references "
    "target targets gold expected message messages conversation conversations record example item "
    "batch data state info parser args kwargs trainer trainer_state sampling_params env".split()
)


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


def load_generate(name: str) -> EpisodeProgram:
    """Return the program of the episode function, or of the class, of this name.

    Raises: ConfigError, also for its signature.
    """
    named = load_function("hooks.generate", name)
    if is_program(named):
        program = _made(name, cast("type[EpisodeProgram]", named))
        forms = (program.open, "site"), (program.play, *EPISODE), (program.close,)
        if all(_takes(*form) for form in forms):
            return program
    if isinstance(named, type):
        raise _wrong("hooks.generate", name, named, PROGRAM_FORM)
    return FunctionProgram(_loaded("hooks.generate", name, GENERATE_FORM, *EPISODE))


def load_keep_group(name: str) -> Callable[..., Any]:
    """Return the `keep_group` of this name. Raises: ConfigError, also for its signature."""
    return _loaded("hooks.keep_group", name, KEEP_GROUP_FORM, CONTEXT, "group")


def load_pick_sources(name: str) -> Callable[[int, list[str]], Mapping[str, float]]:
    """Return the `pick_sources` of this name. Raises: ConfigError, also for its signature."""
    return _loaded("hooks.pick_sources", name, PICK_SOURCES_FORM, "step", "sources")


def check_hooks(cfg: HookConfig) -> None:
    """Import the hooks that a config names. Raises: ConfigError when one cannot be used."""
    loads = (load_generate, load_keep_group, load_pick_sources)
    names = (cfg.generate, cfg.keep_group, cfg.pick_sources)
    for load, name in zip(loads, names, strict=True):
        if name:
            load(name)
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
    parameters = _by_place(function)
    takes_context = parameters[:1] == [CONTEXT]
    whole_group = parameters[1 + takes_context : 2 + takes_context] == [WHOLE_GROUP]
    form = ("prompt", WHOLE_GROUP if whole_group else "sample")
    if not _takes(function, *((CONTEXT, *form) if takes_context else form)):
        raise _wrong("reward", name, function, REWARD_FORMS)
    return RewardForm(takes_context, whole_group, _is_async(function))


def _made(name: str, program: type[EpisodeProgram]) -> EpisodeProgram:
    try:
        return program()
    except Exception as error:  # the user's class may raise anything
        made = f"making an object of it raised {type(error).__name__}: {error}"
        raise ConfigError(f"hooks.generate {name!r}: {made}") from error


def _loaded(kind: str, name: str, form: str, *parameters: str) -> Callable[..., Any]:
    function = load_function(kind, name)
    if _is_async(function) != form.startswith("async") or not _takes(function, *parameters):
        raise _wrong(kind, name, function, form)
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004  of an object that is called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _takes(function: Callable[..., Any], *form: str) -> bool:
    """Return whether a function can be called with these arguments, by place, and expects them."""
    try:
        inspect.signature(function).bind(*form)
    except TypeError:
        return False
    named = zip(_by_place(function), form, strict=False)
    is_else = any(name != meant and name in OURS | ELSEWHERE for name, meant in named)
    return not is_else and not isinstance(function, type)


def _by_place(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that are given by place, without `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _wrong(kind: str, name: str, function: Callable[..., Any], form: str) -> ConfigError:
    what = "async " if _is_async(function) else "a class, " if isinstance(function, type) else ""
    return ConfigError(
        f"{kind} {name!r}: it is {what}{part_name(name)}{inspect.signature(function)}: "
        f"write it as {form}"
    )
