"""Agents that call the policy over HTTP: their task, and what becomes of their episode."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spmd_rl.environments.client_errors import zeroed
from spmd_rl.environments.config import AgentConfig
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.replies import choose_format
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.turns import Branches
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.hooks.load import load_function
from spmd_rl.hooks.program import Site
from spmd_rl.hooks.results import BadResult, as_grade
from spmd_rl.hooks.signatures import reward_weights
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import ERROR, Sample

if TYPE_CHECKING:
    from spmd_rl.gateway.process import Gateway

MAX_NOTE = 1000  # characters of what an agent says


def gateway_of(cfg: AgentConfig, site: Site) -> Gateway:
    """Return the gateway of a process, which is entered outside of any episode.

    Raises: ConfigError where its packages are missing.
    """
    try:
        from spmd_rl.gateway.process import Gateway  # its packages are an extra
    except ImportError as error:
        raise _needs_packages(cfg, error) from error
    return Gateway(cfg.gateway, site, Branches(load_learn(cfg.learn)))


def check_gateway(cfg: AgentConfig) -> None:
    """Raise a ConfigError where its packages are missing, or its settings name no form of calls."""
    if importlib.util.find_spec("uvicorn") is None:
        raise _needs_packages(cfg, "uvicorn")
    if cfg.gateway.response_template:
        choose_format(cfg.gateway.response_template, None)


def _needs_packages(cfg: AgentConfig, missing: object) -> ConfigError:
    return ConfigError(
        f"agent.kind = {cfg.kind!r} needs the packages of the extra 'agents': "
        f"pip install -e '.[agents]' in the repository of spmd_rl ({missing})"
    )


def load_learn(learn: str) -> str | Callable[[Sample], Any]:
    """Return what is learned of an episode: a word, or the function of `agent.learn`.

    Raises: ConfigError for a function that cannot be used.
    """
    if ":" not in learn:
        return learn
    function = load_function("agent.learn", learn)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"agent.learn {learn!r}: expected learn(sample) ({error})") from error
    return function


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as the task of an agent.

    "question" is the text of the last message of the user, "messages" are all messages of the
    prompt, and "meta" are the other fields of its record.
    """
    return {
        "question": prompt.question or prompt.text,
        "messages": prompt.chat.get("messages", []),
        "meta": prompt.meta,
    }


def end_samples(
    ctx: HookContext, prompt: Prompt, session: Session, result: Any, no_reward: str
) -> list[Sample]:
    """Return the samples of an episode whose agent has ended with this result.

    Where the limit of turns has ended it, the samples are truncated, and an agent that gives no
    reward has that of 0. `no_reward` says that it gave none.
    Raises: EpisodeFailure, as `rewarded` does, and where a reward is wanted that it did not give.
    """
    samples = session.samples()
    if session.is_over:
        samples = zeroed(samples, "the episode has had all its turns", is_over=True)
    samples = rewarded(samples, result)
    wanted = reward_weights(prompt.reward or ctx.config.get("reward", ""))
    if "environment" in wanted and any(math.isnan(sample.reward) for sample in samples):
        problem = "reward = 'environment' needs it, or name a grader in reward"
        raise EpisodeFailure("agent", f"{no_reward}: {problem}")
    return samples


def rewarded(samples: list[Sample], result: Any) -> list[Sample]:
    """Return the samples of an episode with the reward that its agent gave, if it gave one.

    A result is None, a text, a number, or a dict with the key "reward".
    Raises: EpisodeFailure when the agent has drawn nothing, or for another result.
    """
    if not samples:
        raise EpisodeFailure("agent", "the agent has ended without a call of the policy to learn")
    if result is None or isinstance(result, str):
        return samples
    if isinstance(result, Mapping) and "reward" not in result:
        return samples
    try:
        grade = as_grade(result)
    except BadResult as problem:
        raise EpisodeFailure("agent", f"the agent {problem}") from problem
    return [
        sample.replace(
            reward=grade.reward,
            parts=grade.parts,
            metadata={key: value for key, value in sample.metadata.items() if key != ERROR},
        )
        for sample in samples
    ]
