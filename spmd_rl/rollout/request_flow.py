"""Request flow of one rank: prompts go through the engine and the grader, and groups come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spmd_rl.rollout.engine import Engine, Request, SamplingConfig
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Group, Sample

Key = tuple[int, int]  # uid and index of a sample


@dataclass(eq=False)
class OpenGroup:
    """A group that is not whole yet.

    `drawing` are the indices that the engine has, and `grading` the samples that it has finished
    and nobody has graded. `on_done` is called with the group once both are empty.
    """

    prompt: Prompt
    sampling: SamplingConfig
    on_done: Callable[[Group], None]
    drawing: set[int] = field(default_factory=set)
    grading: dict[int, Sample] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)
    reward_time_s: float = 0.0

    def snapshot(self, drawing: Iterable[Sample]) -> Group:
        """Return the group as it is now, where `drawing` are its samples that the engine has."""
        samples = sorted([*self.samples, *self.grading.values(), *drawing], key=_index)
        return Group(self.prompt, samples, self.failed, self.reward_time_s)

    def whole(self) -> Group:
        """Return the finished group.

        A group that failures leave with a single sample, which nothing compares with, is emptied.
        """
        lone = bool(self.failed) and len(self.samples) < 2
        samples = [] if lone else sorted(self.samples, key=_index)
        return Group(self.prompt, samples, self.failed, self.reward_time_s)


class Grading(Protocol):
    """Grades finished samples beside the engine."""

    def submit(self, samples: Sequence[tuple[OpenGroup, Sample]]) -> None:
        """Begin to grade samples that one step of the engine has finished. It does not block."""
        ...

    def has_news(self) -> bool:
        """Whether `graded` would return something."""
        ...

    def graded(self) -> list[tuple[OpenGroup, Sample]]:
        """Return what was graded since the last call; what could not be has failed."""
        ...

    def forget(self, group: OpenGroup) -> None:
        """Grade no more samples of this group."""
        ...


class RequestFlow:
    """Requests that are on their way through one engine.

    `text_of` decodes a sample's tokens. The main thread of a rank uses it.
    """

    def __init__(
        self, engine: Engine, text_of: Callable[[list[int]], str], grading: Grading | None
    ) -> None:
        self._engine = engine
        self._text_of = text_of
        self._grading = grading
        self._drawing: dict[Key, OpenGroup] = {}
        self._open: dict[int, OpenGroup] = {}  # by identity

    def has_work(self) -> bool:
        """Whether `step` would do something now."""
        if self._engine.has_work and not self._engine.is_pushing:
            return True
        return self._grading is not None and self._grading.has_news()

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingConfig,
        on_done: Callable[[Group], None],
        *,
        seed: int,
        first_index: int = 0,
        partial: Sequence[Sample] = (),
    ) -> OpenGroup:
        """Begin the samples of one prompt, and go on with those of an earlier answer in `partial`.

        A sample of `partial` that has a reward, or needs none, is kept as it is.
        Raises: DataError or SpmdError when the engine refuses a sample. Then nothing has begun.
        """
        group = OpenGroup(prompt, sampling, on_done)
        before = {sample.index: sample for sample in partial}
        unfinished = {one.index: one for one in partial if one.status == "aborted"}
        finished = [one for one in partial if one.index not in unfinished]
        fresh = range(first_index, first_index + sampling.num_samples)
        self._open[id(group)] = group
        try:
            for index in sorted({*fresh, *before}):
                if index in unfinished or index not in before:
                    self._draw(group, index, seed, unfinished.get(index))
        except BaseException:
            self.abort(group)
            raise
        self._grade([(group, sample) for sample in finished])
        self._close_if_whole(group)  # also where there is nothing to do
        return group

    def abort(self, group: OpenGroup) -> Group:
        """End a group now, and return it with its unfinished samples. `on_done` is not called."""
        ended: list[Sample] = []
        for index in sorted(group.drawing):
            ended += self._engine.abort(group.prompt.uid, index)
            del self._drawing[group.prompt.uid, index]
        group.drawing.clear()
        if self._grading is not None and group.grading:
            self._grading.forget(group)
        self._open.pop(id(group), None)
        return group.snapshot([self._with_text(sample) for sample in ended])

    def clear(self) -> None:
        """End all groups, whose callers learn nothing of it."""
        self._engine.abort()
        self._drawing.clear()
        for group in list(self._open.values()):
            group.drawing.clear()
            self.abort(group)

    def step(self) -> None:
        """Take the engine one step further, and what it has finished to the grader."""
        engine = self._engine
        if engine.has_work and not engine.is_pushing and (finished := engine.step().finished):
            self._grade([self._drawn(sample) for sample in finished])
        if self._grading is not None:
            for group, sample in self._grading.graded():
                del group.grading[sample.index]
                (group.failed if sample.status == "failed" else group.samples).append(sample)
                self._close_if_whole(group)

    def snapshots(self) -> list[Group]:
        """Return all open groups as they are now."""
        drawing: dict[int, list[Sample]] = {}
        for sample in self._engine.snapshot():
            group = self._drawing[sample.prompt_uid, sample.index]
            drawing.setdefault(id(group), []).append(sample)
        return [group.snapshot(drawing.get(key, ())) for key, group in self._open.items()]

    def _draw(self, group: OpenGroup, index: int, seed: int, partial: Sample | None) -> None:
        prompt = group.prompt
        request = Request(prompt.uid, index, prompt.tokens, group.sampling, seed=seed)
        self._engine.submit(request if partial is None else request.resumed(partial))
        self._drawing[prompt.uid, index] = group
        group.drawing.add(index)

    def _drawn(self, sample: Sample) -> tuple[OpenGroup, Sample]:
        """Take a sample from the engine, and return it with its text and its group."""
        group = self._drawing.pop((sample.prompt_uid, sample.index))
        group.drawing.discard(sample.index)
        return group, self._with_text(sample)

    def _with_text(self, sample: Sample) -> Sample:
        return sample.replace(text=self._text_of(sample.tokens.tolist()))

    def _grade(self, samples: list[tuple[OpenGroup, Sample]]) -> None:
        """Have samples graded, unless they are already or nobody grades."""
        ungraded = []
        for group, sample in samples:
            if self._grading is None or not np.isnan(sample.reward):
                group.samples.append(sample)
            else:
                group.grading[sample.index] = sample
                ungraded.append((group, sample))
        if ungraded and self._grading is not None:
            self._grading.submit(ungraded)
        for group, _ in samples:
            self._close_if_whole(group)

    def _close_if_whole(self, group: OpenGroup) -> None:
        is_whole = not group.drawing and not group.grading
        if is_whole and self._open.pop(id(group), None) is not None:
            group.on_done(group.whole())


def _index(sample: Sample) -> int:
    return sample.index
