"""Tasks that a rank gives its pool of hooks, and the events that come of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.results import Grade
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class SampleTask(msgspec.Struct, frozen=True):
    """Grade one sample by every reward function that takes a sample."""

    prompt: Prompt
    sample: Sample
    info: CallInfo


class GroupTask(msgspec.Struct, frozen=True):
    """Grade the samples of a prompt by every reward function that takes a whole group."""

    prompt: Prompt
    samples: Sequence[Sample]
    info: CallInfo


Task = SampleTask | GroupTask


class Graded(msgspec.Struct, frozen=True):
    """A task's grades, one a sample, by the name of the function.

    `metrics` are what the functions emitted. `seconds` is the time that the functions took.
    """

    task_id: int
    grades: dict[str, list[Grade]]
    metrics: dict[str, float]
    seconds: float


class Failed(msgspec.Struct, frozen=True):
    """A task has failed. `where` names the function and the sample, `problem` ends the sentence."""

    task_id: int
    where: str
    problem: str
    seconds: float = 0.0

    @property
    def error(self) -> str:
        return f"{self.where}: {self.problem}"


Event = Graded | Failed
