"""Grading on the rank itself, between two steps of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.errors import DataError
from spmd_rl.observe.trace import Trace, now_ns
from spmd_rl.rewards.grade import Grader
from spmd_rl.rollout.request_flow import OpenGroup
from spmd_rl.types.samples import Sample

SHOWN_NS = 1_000_000  # the shortest grading that is worth a span in the trace


class InlineGrading:
    """Implements `request_flow.Grading`.

    With `skips`, a sample that cannot be graded is left out; else its error is raised.
    """

    def __init__(self, grader: Grader, trace: Trace, *, skips: bool) -> None:
        self._grader = grader
        self._trace = trace
        self._skips = skips
        self._graded: list[tuple[OpenGroup, Sample]] = []

    def submit(self, samples: Sequence[tuple[OpenGroup, Sample]]) -> None:
        began_ns = now_ns()
        with self._grader:
            for group, sample in samples:
                self._graded.append(self._grade(group, sample))
        if (ended_ns := now_ns()) - began_ns >= SHOWN_NS:
            self._trace.add("reward", began_ns, ended_ns, samples=len(samples))

    def has_news(self) -> bool:
        return bool(self._graded)

    def graded(self) -> list[tuple[OpenGroup, Sample]]:
        graded, self._graded = self._graded, []
        return graded

    def forget(self, group: OpenGroup) -> None:
        self._graded = [one for one in self._graded if one[0] is not group]

    def _grade(self, group: OpenGroup, sample: Sample) -> tuple[OpenGroup, Sample]:
        before_s = self._grader.reward_time_s
        try:
            return group, self._grader.grade(group.prompt, sample)
        except DataError as error:
            if not self._skips:
                raise
            return group, sample.replace(status="failed", metadata={"error": str(error)})
        finally:
            group.reward_time_s += self._grader.reward_time_s - before_s
