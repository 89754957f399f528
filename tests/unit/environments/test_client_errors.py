"""Errors of agents: what the policy has caused is a reward of 0, and all else a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spmd_rl.environments.client_errors import after_error, names_in, names_of
from spmd_rl.environments.config import OnError
from spmd_rl.environments.function import FunctionAgent
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure, FailureKind
from spmd_rl.types.samples import ERROR, Sample
from tests.unit.environments.test_clients import PROMPT, Session, program
from tests.unit.hooks.cases import make_sample

FINE: dict[str, Any] = {}
CUT = {"status": "truncated"}
FULL = {"metadata": {"fault": "context"}}
WRONG = {"metadata": {"fault": "call"}}


class UnexpectedModelBehavior(Exception):
    """As pydantic-ai calls it."""


class Own(UnexpectedModelBehavior):
    """A class of its own."""


def error_of(cause: BaseException) -> BaseException:
    try:
        raise RuntimeError("the agent is lost") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("ends", "names", "status"),
    [
        ([CUT], [], ["truncated"]),
        ([FINE, CUT], [], ["completed", "truncated"]),
        ([FULL], [], ["truncated"]),
        ([WRONG], [], ["completed"]),
        ([FINE], names_of(UnexpectedModelBehavior()), ["completed"]),
        ([FINE], names_of(Own()), ["completed"]),
        ([FINE], names_of(error_of(Own())), ["completed"]),
        ([FINE], names_in("Traceback ...\nagents.exceptions.MaxTurnsExceeded: 10"), ["completed"]),
        ([FINE], names_in("langgraph.errors.GraphRecursionError"), ["completed"]),
        ([FINE], names_in("dspy.utils.exceptions.AdapterParseError: no field"), ["completed"]),
    ],
)
def test_what_the_policy_has_caused_is_learned(
    ends: list[dict[str, Any]], names: Any, status: list[str]
) -> None:
    samples = [make_sample(index=index).replace(**end) for index, end in enumerate(ends)]
    failure = EpisodeFailure("agent", "it raised")
    names = list(names)
    found = after_error(samples, failure, names, "zero")
    assert [(one.reward, one.status, one.metadata[ERROR]) for one in found] == [
        (0.0, one, "it raised") for one in status
    ]
    with pytest.raises(EpisodeFailure, match="it raised"):
        after_error(samples, failure, names, "fail")


@pytest.mark.parametrize(
    ("ends", "kind", "names"),
    [
        ([FINE], "agent", names_of(KeyError())),
        ([FINE], "agent", names_of(error_of(KeyError()))),
        ([FINE], "agent", names_in("it saw a MaxTurnsExceeded: no\n  MaxTurnsExceeded: indented")),
        ([CUT], "timeout", []),
        ([CUT], "sandbox", []),
        ([], "agent", []),
    ],
)
def test_what_the_world_has_caused_has_failed(
    ends: list[dict[str, Any]], kind: FailureKind, names: Any
) -> None:
    samples = [make_sample().replace(**end) for end in ends]
    with pytest.raises(EpisodeFailure, match="it raised"):
        after_error(samples, EpisodeFailure(kind, "it raised"), names, "zero")


async def breaks(base_url: str, key: str, task: dict[str, Any]) -> None:
    raise KeyError("tool")


async def returns_nothing(base_url: str, key: str, task: dict[str, Any]) -> None:
    """Its reward is None."""


def function(name: str) -> FunctionAgent:
    return FunctionAgent(f"{__file__}:{name}", 1)


def played(agent: Any, session: Session, **config: Any) -> Any:
    return asyncio.run(agent.play(HookContext(config), PROMPT, session))


class CutSession(Session):
    """Its last reply was cut."""

    def samples(self) -> list[Sample]:
        return [one.replace(status="truncated") for one in super().samples()]


@pytest.mark.parametrize("on_error", ["zero", "fail"])
@pytest.mark.parametrize("kind", ["function", "command"])
def test_programs_and_functions_keep_the_rule(kind: str, on_error: OnError) -> None:
    agent: Any = function("breaks") if kind == "function" else program("raise KeyError('tool')")
    agent._on_error = on_error
    with pytest.raises(EpisodeFailure, match="KeyError"):
        played(agent, Session())
    if on_error == "fail":
        with pytest.raises(EpisodeFailure, match="KeyError"):
            played(agent, CutSession())
        with pytest.raises(EpisodeFailure, match="KeyError"):
            played(agent, Session(is_over=True))
    else:
        (sample,) = played(agent, CutSession())
        assert (sample.reward, sample.status) == (0.0, "truncated")
        assert "KeyError" in sample.metadata[ERROR]


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (lambda: function("returns_nothing"), "the agent returned None, which is no reward"),
        (lambda: program("pass"), "the program left no reward in result.json"),
    ],
)
def test_a_reward_that_is_missing_names_who_has_to_give_it(agent: Any, problem: str) -> None:
    with pytest.raises(EpisodeFailure, match=f"{problem}: reward = 'environment' needs it"):
        played(agent(), Session(), reward="environment")
    for reward in ("", "math", {"rules.py:score": 1.0}):
        (sample,) = played(agent(), Session(), reward=reward)
        assert sample.reward != sample.reward  # a grader gives it
    (sample,) = played(agent(), Session(is_over=True), reward="environment")
    assert (sample.reward, sample.status) == (0.0, "truncated")
