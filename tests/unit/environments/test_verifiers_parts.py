"""What verifiers leaves of an episode becomes a reward, or a failure by the class of its error."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.make import check_agent
from spmd_rl.environments.verifiers import refuse_errors, reward_of, samples_of_traces
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import AGENT
from tests.unit.environments.test_clients import Session


def trace(reward: float = 0.75, errors: Any = (), name: str = "agent") -> Any:
    rewards = {"right": SimpleNamespace(value=reward), "skipped": None}
    metrics = {"letters": 3.0, "unknown": None}
    values = {"rewards": rewards, "metrics": metrics, "errors": list(errors)}
    agent = SimpleNamespace(name=name, trainable=name != "user")
    return SimpleNamespace(id=name, reward=reward, agent=agent, **values)


def episode(*traces: Any, errors: Any = ()) -> Any:
    return SimpleNamespace(traces=list(traces), errors=list(errors))


def test_rewards_and_metrics_are_parts() -> None:
    assert reward_of(trace()) == {"right": 0.75, "letters": 3.0, "reward": 0.75}


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
            refuse_errors(broken)
        assert failure.value.kind == kind


def test_each_agent_has_the_samples_and_the_reward_of_its_trace() -> None:
    traces = [trace(1.0, name="solver"), trace(0.25, name="judge"), trace(0.5, name="silent")]
    traces.append(trace(name="user"))
    sessions = {"solver": Session(2), "judge": Session(1), "silent": Session(0), "user": Session(1)}
    samples = samples_of_traces(traces, sessions)
    assert [(one.metadata[AGENT], one.reward) for one in samples] == [
        ("solver", 1.0),
        ("solver", 1.0),
        ("judge", 0.25),
    ]
    (alone,) = samples_of_traces(traces[:1], {"solver": Session(1)})
    assert AGENT not in alone.metadata
    with pytest.raises(EpisodeFailure, match="without a call of the policy"):
        samples_of_traces(traces[2:], sessions)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed")
def test_the_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs the package verifiers: pip install"):
        check_agent(AgentConfig(kind="verifiers", name="textarena"))
