"""What verifiers leaves of an episode becomes a reward, or a failure by the class of its error."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.make import check_agent
from spmd_rl.environments.verifiers import reward_of
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure


def trace(reward: float = 0.75, errors: Any = ()) -> Any:
    rewards = {"right": SimpleNamespace(value=reward), "skipped": None}
    metrics = {"letters": 3.0, "unknown": None}
    return SimpleNamespace(reward=reward, rewards=rewards, metrics=metrics, errors=list(errors))


def episode(*traces: Any, errors: Any = ()) -> Any:
    return SimpleNamespace(traces=list(traces), errors=list(errors))


def test_rewards_and_metrics_are_parts() -> None:
    assert reward_of(episode(trace())) == {"right": 0.75, "letters": 3.0, "reward": 0.75}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SandboxError", "sandbox"),
        ("ProviderError", "engine"),
        ("HarnessError", "agent"),
        ("ToolsetError", "tool"),
        ("TimeoutError", "timeout"),
        ("TaskError", "environment"),
        ("KeyError", "environment"),
    ],
)
def test_an_error_is_no_reward_of_zero(name: str, kind: str) -> None:
    error = SimpleNamespace(type=name, message="it broke")
    for broken in (episode(trace(0.0, [error])), episode(errors=[error])):
        with pytest.raises(EpisodeFailure, match=f"{name}: it broke") as failure:
            reward_of(broken)
        assert failure.value.kind == kind


def test_several_agents_are_refused() -> None:
    with pytest.raises(EpisodeFailure, match="2 agents: one can be trained"):
        reward_of(episode(trace(), trace()))


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed")
def test_the_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs the package verifiers: pip install"):
        check_agent(AgentConfig(kind="verifiers", name="textarena"))
