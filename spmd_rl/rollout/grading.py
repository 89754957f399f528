"""Grading of drawn samples by the reward functions, which run in processes beside the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spmd_rl.errors import DataError
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import Failed, Graded, GroupTask, SampleTask
from spmd_rl.hooks.results import WHOLE, merged
from spmd_rl.rollout.grader_choice import GraderChoice
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import ERROR, GIVEN, Sample

_Drawn = tuple[OpenGroup, Sample]
_Graded = tuple[OpenGroup, Sample | None]  # a sample of a group, or None for all of them


class Grading:
    """Sends samples to the pool of hooks, and completes them with what comes back.

    `choice` says which functions grade a prompt's samples. With `raises`, a function that fails
    ends the calls of the rank, unless the failure is spared; else its sample has failed.
    """

    def __init__(self, pool: HookPool, choice: GraderChoice, *, raises: bool) -> None:
        self._pool = pool
        self._choice = choice
        self._raises = raises
        self._tasks: dict[int, _Graded] = {}

    def grades(self, prompt: Prompt) -> bool:
        """Return whether any function grades this prompt's samples. Raises: DataError."""
        return bool(self._choice.of(prompt).numbers)

    def ungraded(self, samples: Iterable[_Drawn]) -> list[_Drawn]:
        """Return samples of episodes as their graders take them, where they have some: the reward
        that the episode gave is beside it. One with an error keeps its reward.
        """
        return [(group, self._without_reward(group.prompt, one)) for group, one in samples]

    def _without_reward(self, prompt: Prompt, sample: Sample) -> Sample:
        if math.isnan(sample.reward) or ERROR in sample.metadata or not self.grades(prompt):
            return sample
        given = {GIVEN: {**sample.parts, WHOLE: sample.reward}}
        return sample.replace(reward=math.nan, parts={}, metadata=sample.metadata | given)

    def submit(self, samples: Iterable[_Drawn]) -> None:
        """Begin to grade samples. It does not block."""
        for group, sample in samples:
            group.grading[sample.index] = sample
            numbers = self._choice.of(group.prompt).numbers
            task = self._pool.submit(SampleTask(group.prompt, sample, group.info, numbers))
            self._tasks[task] = group, sample

    def take(self, event: Graded | Failed) -> OpenGroup:
        """Act on an event of the pool, and return the group that it is about.

        Raises: DataError that names the function and quotes the sample, if failures raise.
        """
        group, sample = self._tasks.pop(event.task_id)
        group.reward_time_s += event.seconds
        if isinstance(event, Failed):
            self._fail(group, sample, event)
        elif sample is None:
            self._complete_group(group, event)
        else:
            self._complete(group, sample, event)
        return group

    def grade_group(self, group: OpenGroup) -> bool:
        """Begin the functions that take the whole group; return whether there are any.

        They do not see samples whose agent's error is their reward.
        """
        if group.has_group_grades:
            return False
        numbers = self._choice.of(group.prompt).numbers & self._pool.group_functions
        samples = [one for one in group.samples if ERROR not in one.metadata]
        if not numbers or not samples:
            return False
        group.has_group_grades = True
        samples.sort(key=lambda sample: sample.index)
        group.samples = [one for one in group.samples if ERROR in one.metadata]
        group.grading = {sample.index: sample for sample in samples}
        task = self._pool.submit(GroupTask(group.prompt, samples, group.info, numbers))
        self._tasks[task] = group, None
        return True

    def reopen(self, group: OpenGroup) -> None:
        """Drop the grades of a group that goes on later, if a function takes the whole of it: then
        it needs those of all functions at once.
        """
        if self._choice.of(group.prompt).numbers & self._pool.group_functions:
            group.samples = [
                one.replace(reward=math.nan, parts={}) if one.index in group.grades else one
                for one in group.samples
            ]

    def forget(self, group: OpenGroup) -> None:
        """Grade nothing more of this group."""
        for task in [task for task, (other, _) in self._tasks.items() if other is group]:
            del self._tasks[task]
            self._pool.cancel(task)

    def _complete(self, group: OpenGroup, sample: Sample, event: Graded) -> None:
        del group.grading[sample.index]
        grades = {name: of_sample[0] for name, of_sample in event.grades.items()}
        group.grades[sample.index] = grades
        group.samples.append(self._rewarded(_with_told(sample, event), group))

    def _complete_group(self, group: OpenGroup, event: Graded) -> None:
        samples, group.grading = list(group.grading.values()), {}
        for number, sample in enumerate(samples):
            own = {name: of_group[number] for name, of_group in event.grades.items()}
            group.grades.setdefault(sample.index, {}).update(own)
            group.samples.append(self._rewarded(_with_told(sample, event), group))

    def _rewarded(self, sample: Sample, group: OpenGroup) -> Sample:
        """Return the sample with its reward, from the grades that there are so far."""
        grades = group.grades[sample.index]
        weights = self._choice.of(group.prompt).weights
        if len(weights) == 1 and grades:
            (grade,) = grades.values()
            (weight,) = weights.values()
            return sample.replace(reward=weight * grade.reward, parts=grade.parts)
        grade = merged(grades, weights)
        return sample.replace(reward=grade.reward, parts=grade.parts)

    def _fail(self, group: OpenGroup, sample: Sample | None, event: Failed) -> None:
        if self._raises and not event.is_spared:
            raise DataError(event.where, event.problem)
        for failed in list(group.grading.values()) if sample is None else [sample]:
            del group.grading[failed.index]
            group.fail(failed, event.error)


def _with_told(sample: Sample, event: Graded) -> Sample:
    """Return the sample with what hooks emitted and noted."""
    metadata = dict(sample.metadata)
    if event.metrics:
        metadata["metrics"] = {**metadata.get("metrics", {}), **event.metrics}
    if event.notes:
        metadata["notes"] = {**metadata.get("notes", {}), **event.notes}
    return sample.replace(metadata=metadata) if event.metrics or event.notes else sample
