"""Request flow of one rank: prompts go through the engine and the hooks, and groups come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import (
    EngineCall,
    EpisodeEnded,
    Event,
    Failed,
    Graded,
    TurnCancelled,
)
from spmd_rl.observe.request_times import RequestTimes
from spmd_rl.observe.trace import Trace, now_ns
from spmd_rl.rollout.engine import Engine, Request, SamplingConfig
from spmd_rl.rollout.engine_load import LoadMeter
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.episodes import Key, RunningEpisodes, with_turns
from spmd_rl.rollout.grading import Grading
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.rollout.rounds import ends_with_round, sampling_of_round
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class RequestFlow:
    """Requests that are on their way through one engine. The main thread of a rank uses it.

    `text_of` decodes a sample's tokens, and `limits` are those of the model. `grading` is None
    where there is no reward, and `episodes` where the engine makes each sample in one turn; both
    use `pool`. With a `trace` that is on, groups get the times of their requests. `meter` measures
    the load of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        text_of: Callable[[list[int]], str],
        limits: ModelLimits,
        pool: HookPool | None = None,
        grading: Grading | None = None,
        episodes: RunningEpisodes | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._engine = engine
        self._text_of = text_of
        self._limits = limits
        self._pool = pool
        self._grading = grading
        self._episodes = episodes
        self._times = RequestTimes(trace or Trace())
        self.meter = LoadMeter()
        self._drawing: dict[Key, OpenGroup] = {}  # by the request that the engine has
        self._open: dict[int, OpenGroup] = {}  # by identity

    @property
    def can_step(self) -> bool:
        """Whether the engine has work that it may do now."""
        return self._engine.has_work and not self._engine.is_pushing

    def watched(self) -> list[int]:
        """Return descriptors that are readable when a hook has news."""
        return self._pool.filenos() if self._pool is not None else []

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingConfig,
        on_done: Callable[[Group], None],
        *,
        info: CallInfo,
        first_index: int = 0,
        partial: Sequence[Sample] = (),
        round_tokens: int = 0,
    ) -> OpenGroup:
        """Begin the samples of one prompt, and go on with those of an earlier answer in `partial`.

        A sample of `partial` that is finished is kept, and graded if nobody has. `info` holds the
        seed of the draws. With `round_tokens` each sample draws at most that many, and the group
        ends with samples that are not finished.
        Raises: DataError or SpmdError when the engine refuses a sample. Then nothing has begun.
        """
        group = OpenGroup(prompt, sampling, info.seed, info, on_done, round_tokens=round_tokens)
        unfinished = {one.index: one for one in partial if one.status == "aborted"}
        finished = [one for one in partial if one.index not in unfinished]
        fresh = _not_begun(first_index, sampling.num_samples, finished)
        self._open[id(group)] = group
        indices = sorted(fresh | unfinished.keys())
        group.first = prompt.uid, indices[0] if indices else first_index
        self._times.submit(group.first)
        try:
            for index in indices:
                self._draw(group, index, unfinished.get(index))
        except BaseException:
            self.abort(group)
            raise
        self._finish([(group, sample) for sample in finished])
        self._close_if_whole(group)  # also where there is nothing to do
        return group

    def abort(self, group: OpenGroup) -> Group:
        """End a group now, and return it with its unfinished samples. `on_done` is not called."""
        self._times.forget(group.first)
        if self._episodes is not None:
            turns = self._abort_requests(self._episodes.requests_of(group))
            drawing = self._episodes.unfinished(group, turns)
            self._episodes.forget(group)
        else:
            drawing = self._abort_requests(
                [(group.prompt.uid, index) for index in sorted(group.drawing)]
            )
        group.drawing.clear()
        if self._grading is not None and group.grading:
            self._grading.forget(group)
        self._open.pop(id(group), None)
        return group.snapshot(map(self._with_text, drawing))

    def clear(self) -> None:
        """End all groups, whose callers learn nothing of it."""
        for group in list(self._open.values()):
            self.abort(group)
        self._engine.abort()

    def step(self, steps: bool = True) -> None:
        """Take the engine one step further if `steps` is set, and what is finished to the hooks and
        back.

        Raises: DataError for a hook that fails, if failures raise; what the engine raises.
        """
        if steps and not self._engine.is_pushing:
            began_ns = now_ns()
            output = self._engine.step()
            num_running, num_waiting = self._engine.load
            self.meter.add_step(num_running + len(output.finished), num_waiting)
            self._times.mark_step(began_ns, output.started, output.uids, output.indices)
            if self._episodes is not None:
                self._episodes.show(output)
            if finished := output.finished:
                self._finish([drawn for sample in finished if (drawn := self._drawn(sample))])
        if self._pool is not None and self._pool.num_unfinished:
            for event in self._pool.poll():
                self._act(event)
        if self._episodes is not None:
            for task, turns in self._episodes.ended_rounds():
                self._pause(self._episodes, task, turns)

    def snapshots(self) -> list[Group]:
        """Return all open groups as they are now; what runs goes on."""
        drawing: dict[int, list[Sample]] = {}
        if self._episodes is None:
            for sample in self._engine.snapshot():
                group = self._drawing[sample.prompt_uid, sample.index]
                drawing.setdefault(id(group), []).append(sample)
        else:
            turns = self._engine.snapshot()
            for key, group in self._open.items():
                drawing[key] = self._episodes.unfinished(group, turns)
        return [group.snapshot(drawing.get(key, ())) for key, group in self._open.items()]

    def _draw(self, group: OpenGroup, index: int, partial: Sample | None) -> None:
        """Begin a sample, or go on with it."""
        if self._episodes is not None:
            self._episodes.start(group, index, partial)
            return
        prompt, sampling = group.prompt, group.sampling
        if group.round_tokens:
            num_past = 0 if partial is None else len(partial.tokens)
            sampling = sampling_of_round(sampling, num_past, group.round_tokens)
        key = prompt.uid, index, prompt.tokens
        request = Request(*key, sampling, seed=group.seed, priority=group.priority)
        self._engine.submit(request if partial is None else request.resumed(partial))
        self._drawing[prompt.uid, index] = group
        group.drawing.add(index)

    def _drawn(self, sample: Sample) -> tuple[OpenGroup, Sample] | None:
        """Take a sample from the engine, and return it with its text and its group; None for a turn
        of an episode, which goes there.
        """
        if self._episodes is not None:
            self._times.mark_turn(sample.prompt_uid)
            self._episodes.answer(sample, self._text_of(self._episodes.new_tokens(sample)))
            return None
        group = self._drawing.pop((sample.prompt_uid, sample.index))
        group.drawing.discard(sample.index)
        room = self._limits.context_tokens - len(group.prompt.tokens)
        if group.round_tokens and ends_with_round(sample, min(group.sampling.max_tokens, room)):
            sample = sample.replace(status="aborted")
        return group, self._with_text(sample)

    def _pause(self, episodes: RunningEpisodes, task_id: int, turns: list[Sample]) -> None:
        """End an episode that has drawn all tokens of its round; `turns` are its last ones."""
        ended = {(turn.prompt_uid, turn.index) for turn in turns}
        others = [key for key in episodes.requests_of_task(task_id) if key not in ended]
        group, sample = episodes.pause(task_id, turns + self._abort_requests(others))
        group.paused.append(sample)
        self._close_if_whole(group)

    def _with_text(self, sample: Sample) -> Sample:
        text = self._text_of(sample.tokens.tolist())
        return with_turns(sample.replace(text=text), self._text_of)

    def _finish(self, samples: list[tuple[OpenGroup, Sample]]) -> None:
        """Have drawn samples graded, unless they are already or nobody grades."""
        ungraded, grading = [], self._grading
        for group, sample in samples:
            if sample.status == "failed":
                group.failed.append(sample)
            elif sample.status == "aborted":
                group.paused.append(sample)
            elif not (math.isnan(sample.reward) and grading and grading.grades(group.prompt)):
                group.samples.append(sample)
            else:
                ungraded.append((group, sample))
        if ungraded and grading:
            grading.submit(ungraded)
        for group in {id(group): group for group, _ in samples}.values():
            if not group.drawing:
                self._times.mark("drawn", group.first)
            self._close_if_whole(group)

    def _act(self, event: Event) -> None:
        """Act on an event of the pool of hooks."""
        if self._episodes is not None and self._episodes.owns(event.task_id):
            self._act_on_episode(self._episodes, event)
        elif self._grading is not None and isinstance(event, (Graded, Failed)):
            self._close_if_whole(self._grading.take(event))

    def _act_on_episode(self, episodes: RunningEpisodes, event: Event) -> None:
        if isinstance(event, EngineCall):
            self._begin_turn(episodes, event)
        elif isinstance(event, TurnCancelled):
            self._abort_requests(episodes.cancel(event))
        elif isinstance(event, EpisodeEnded | Failed):
            group, samples, left = episodes.take(event)
            self._abort_requests(left)
            if not group.drawing:
                self._times.mark_over(group.first)
            drawn = [(group, self._with_text(sample)) for sample in samples]
            self._finish(drawn if self._grading is None else self._grading.ungraded(drawn))
            self._close_if_whole(group)

    def _begin_turn(self, episodes: RunningEpisodes, call: EngineCall) -> None:
        if (request := episodes.request_of(call)) is None:
            return
        self._times.mark_asked((request.uid, request.index))
        try:
            self._engine.submit(request)
        except (DataError, ConfigError) as error:
            episodes.refuse(call, request, str(error))

    def _abort_requests(self, keys: Iterable[Key]) -> list[Sample]:
        ended: list[Sample] = []
        for key in keys:
            ended += self._engine.abort(*key)
            self._drawing.pop(key, None)
        return ended

    def _close_if_whole(self, group: OpenGroup) -> None:
        if not group.is_drawn_and_graded or id(group) not in self._open:
            return
        if group.paused:
            del self._open[id(group)]
            self._times.forget(group.first)
            if self._grading is not None:
                self._grading.reopen(group)
            group.on_done(group.snapshot(()))
            return
        if self._grading is not None and self._grading.grade_group(group):
            return
        del self._open[id(group)]
        if self._grading is not None:
            self._times.mark("graded", group.first)
        group.times = self._times.finish(group.first)
        group.on_done(group.whole())


def _not_begun(first_index: int, num_samples: int, finished: Iterable[Sample]) -> set[int]:
    """Return the indices of samples, or of episodes, of which none in `finished` has come.

    All samples of an episode have its index, but for a multiple of `num_samples`.
    """
    ended = {first_index + (one.index - first_index) % num_samples for one in finished}
    return {*range(first_index, first_index + num_samples)} - ended
