"""Failures of episodes that say what failed, so that nobody takes them for a reward of 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from spmd_rl.errors import SpmdError

FailureKind = Literal["sandbox", "tool", "environment", "agent", "timeout", "engine", "context"]


class EpisodeFailure(SpmdError):
    """An episode could not be played to its end, and this is not the policy's fault.

    Raised from a `generate` hook, it leaves the sample out of the loss and of the statistics of its
    group, whatever `hooks.on_error` says. `kind` says what failed; the metric `failed/KIND` counts
    such samples. An episode that gives no answer has failed likewise: as "timeout" at its deadline,
    and as "agent" where it has ended its process.
    """

    def __init__(self, kind: FailureKind, problem: str) -> None:
        super().__init__(problem)
        self.kind: FailureKind = kind


@contextmanager
def blaming(kind: FailureKind, caller: str) -> Iterator[None]:
    """Raise an EpisodeFailure of this kind for what code of the user raises. `caller` names it."""
    try:
        yield
    except EpisodeFailure:
        raise
    # a user's code may raise anything
    except Exception as error:
        raise EpisodeFailure(kind, f"{caller} raised {type(error).__name__}: {error}") from error
