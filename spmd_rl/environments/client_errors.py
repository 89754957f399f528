"""Errors of agents that call the policy over HTTP: which of them the policy has caused.

A client raises for a reply that was cut, for a context that is full, for calls that it cannot
answer, and after too many turns. Left out of training, such replies would never be punished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spmd_rl.environments.config import OnError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import ERROR, FAULT, Sample

# By which clients say that the model, and not the world, is at fault.
POLICY_ERRORS = frozenset(
    {
        "LengthFinishReasonError",  # openai
        "MaxTurnsExceeded",  # openai-agents
        "ModelBehaviorError",
        "UnexpectedModelBehavior",  # pydantic-ai
        "OutputTokenLimitExceeded",
        "IncompleteToolCall",
        "UsageLimitExceeded",
        "ModelContextWindowExceededError",
        "AgentParsingError",  # smolagents
        "AgentToolCallError",
        "AgentMaxStepsError",
        "OutputParserException",  # langchain
        "GraphRecursionError",  # langgraph
        "ContextWindowExceededError",  # litellm
        "MaxTokensReachedException",  # strands-agents
        "ContextWindowOverflowException",
        "StructuredOutputException",
        "AdapterParseError",  # dspy
    }
)
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)


def names_of(error: BaseException | None) -> Iterable[str]:
    """Yield the names of an error's classes, and of those that it was raised from."""
    while error is not None:
        yield from (one.__name__ for one in type(error).__mro__)
        error = error.__cause__


def names_in(errors: str) -> Iterable[str]:
    """Yield the names with which lines of a program's errors begin, as a traceback's last one."""
    for found in _RAISED.finditer(errors):
        yield found[1].rpartition(".")[2]


def caused_by_policy(samples: Sequence[Sample], names: Iterable[str]) -> bool:
    """Return whether the policy has caused an error: the last reply of a conversation is at fault,
    or the error has a name by which clients say so.
    """
    at_fault = (one.status == "truncated" or FAULT in one.metadata for one in samples)
    return any(at_fault) or not POLICY_ERRORS.isdisjoint(names)


def after_error(
    samples: Sequence[Sample],
    failure: EpisodeFailure,
    names: Iterable[str],
    on_error: OnError,
    *,
    is_over: bool = False,
) -> list[Sample]:
    """Return the samples of an episode whose agent has ended with an error, with a reward of 0.

    `failure` says what has failed, and `names` are those of the error. `is_over` says that the
    episode has had all its turns.
    Raises: the failure, for an error that the policy has not caused, and with "fail" for all.
    """
    is_of_policy = is_over or caused_by_policy(samples, names)
    if on_error == "fail" or failure.kind not in ("agent", "engine") or not is_of_policy:
        raise failure
    return zeroed(samples, str(failure), is_over=is_over)


def zeroed(samples: Sequence[Sample], error: str, *, is_over: bool) -> list[Sample]:
    """Return samples with a reward of 0 because of an error; those that a limit has ended are
    truncated.
    """
    return [
        one.replace(
            reward=0.0,
            parts={},
            status="truncated" if is_over or one.metadata.get(FAULT) == "context" else one.status,
            metadata=one.metadata | {ERROR: error},
        )
        for one in samples
    ]
