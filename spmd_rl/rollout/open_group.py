"""Group of samples that is not whole yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.failures import FailureKind
from spmd_rl.hooks.results import Grade
from spmd_rl.observe.request_times import TIMES
from spmd_rl.rollout.engine import EVALUATION, TRAINING, SamplingConfig
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import ERROR, FAILURE, Sample


@dataclass(eq=False)
class OpenGroup:
    """The samples of one prompt on their way.

    `drawing` are the indices of samples that the engine or an episode makes. `grading` are drawn
    samples by their index that nobody has graded yet. `grades` holds what functions gave so far, by
    sample and function. `on_done` is called with the group once nothing is missing. `first` is
    (uid, index) of the first sample that is drawn, and `times` are those of the request. Each
    sample draws at most `round_tokens` tokens, if that is not 0; `paused` are those that have drawn
    them and are not finished. `number` counts the groups of this process before this one.
    """

    prompt: Prompt
    sampling: SamplingConfig
    seed: int
    info: CallInfo
    on_done: Callable[[Group], None]
    drawing: set[int] = field(default_factory=set)
    grading: dict[int, Sample] = field(default_factory=dict)
    grades: dict[int, dict[str, Grade]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)
    round_tokens: int = 0
    paused: list[Sample] = field(default_factory=list)
    reward_time_s: float = 0.0
    has_group_grades: bool = False
    number: int = field(default_factory=count().__next__)
    first: tuple[int, int] = (0, 0)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def priority(self) -> int:
        """Which of the requests that wait go first: those of an evaluation, then by age.

        So a later turn of an episode begins before the first ones of younger groups, of which
        those that a step may leave over are the youngest.
        """
        return EVALUATION if self.info.evaluation else TRAINING + self.number

    @property
    def is_drawn_and_graded(self) -> bool:
        return not self.drawing and not self.grading

    def snapshot(self, drawing: Iterable[Sample]) -> Group:
        """Return the group as it is now, where `drawing` are its samples that are not drawn."""
        unfinished = [*self.grading.values(), *self.paused, *drawing]
        samples = sorted([*self.samples, *unfinished], key=_index)
        return Group(self.prompt, samples, self.failed, self.reward_time_s)

    def whole(self) -> Group:
        """Return the finished group, whose first sample has the times of the request.

        A group that failures leave with a single sample, which nothing compares with, is emptied,
        but for an evaluation.
        """
        lone = bool(self.failed) and len(self.samples) < 2 and not self.info.evaluation
        samples = [] if lone else sorted(self.samples, key=_index)
        failed = sorted(self.failed, key=_index)
        if self.times and (listed := samples or failed):
            listed[0] = listed[0].replace(metadata={**listed[0].metadata, TIMES: self.times})
        return Group(self.prompt, samples, failed, self.reward_time_s)

    def fail(self, sample: Sample, error: str, kind: FailureKind | None = None) -> None:
        """Take a sample that nothing learns from; `kind` is that of an EpisodeFailure."""
        metadata = {**sample.metadata, ERROR: error} | ({FAILURE: kind} if kind else {})
        self.failed.append(sample.replace(status="failed", metadata=metadata))


def _index(sample: Sample) -> int:
    return sample.index
