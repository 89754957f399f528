"""Episodes: samples that a `generate` hook makes in several turns of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from spmd_rl.errors import DataError
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeEnded, EpisodeTask, Failed, TurnCancelled
from spmd_rl.hooks.results import BadResult
from spmd_rl.hooks.transcript import Turn, TurnLimits, TurnStatus
from spmd_rl.rollout.engine import Request, SamplingConfig, StepOutput
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.rollout.rounds import ends_with_round, sampling_of_round
from spmd_rl.types.samples import MODEL, NO_VERSION, TURNS, Sample
from spmd_rl.types.token_data import NO_LOGPROBS, NO_TOKENS, TokenData

Key = tuple[int, int]  # uid and index of an engine request
PROGRESS = "progress"  # key of an aborted sample's metadata
DONE, UNKNOWN = "done", "error"  # an episode that is over, and a failure of no kind
OBSERVED = "tool"  # the role of tokens that the policy did not draw


class RunningEpisodes:
    """The episodes that run, and what they ask of the engine.

    With `raises`, an episode that fails ends the calls of the rank; else its sample has failed, and
    so has a sample that no trainer could take.
    """

    def __init__(self, pool: HookPool, limits: ModelLimits, *, raises: bool) -> None:
        self._pool = pool
        self._limits = limits
        self._raises = raises
        self._running: dict[int, tuple[OpenGroup, int]] = {}  # by task
        self._turns: dict[Key, EngineCall] = {}  # by the request that the engine has
        self._left: dict[int, int] = {}  # tokens that a task may still draw in its round
        self._ended_rounds: dict[int, list[Sample]] = {}  # by task, its turns that were cut
        self._ended: Counter[str] = Counter()  # since an episode began while none ran

    def start(self, group: OpenGroup, index: int, partial: Sample | None = None) -> None:
        """Begin the episode that makes sample `index`, or go on with an unfinished one."""
        sampling = group.sampling
        progress = b"" if partial is None else partial.metadata.get(PROGRESS, b"")
        task = EpisodeTask(
            group.prompt,
            index,
            sampling.num_samples,
            sampling.scored_temperature,
            group.info,
            progress,
        )
        if not self._running:
            self._ended = Counter()
        task_id = self._pool.submit(task)
        self._running[task_id] = group, index
        if group.round_tokens:
            self._left[task_id] = group.round_tokens
        group.drawing.add(index)

    def request_of(self, call: EngineCall) -> Request | None:
        """Return the request for a turn; None if it was answered, as there is no room for more, if
        it was refused, or if the episode's round is over.
        """
        group, index = self._running[call.task_id]
        prompt, sampling = group.prompt, group.sampling
        try:
            self._limits.check_ids(call.past.tokens)
            if call.context is not None:
                self._limits.check_ids(call.context)
        except BadResult as problem:
            self._pool.refuse(call.task_id, call.call_id, f"the transcript {problem}")
            return None
        context = prompt.tokens if call.context is None else call.context
        if len(context) + len(call.past) >= self._limits.context_tokens:
            self._pool.reply(call.task_id, call.call_id, Turn(TokenData(), "", "truncated"))
            return None
        past = TokenData.join([call.past, call.begun]) if len(call.begun) else call.past
        of_turn = _turn_sampling(sampling, call.limits, len(call.past))
        if (num_left := self._left.get(call.task_id)) is not None:
            if num_left <= 0:
                self._ended_rounds.setdefault(call.task_id, [])
                return None
            of_turn = sampling_of_round(of_turn, len(past), num_left)
        key = prompt.uid, index + call.transcript * sampling.num_samples
        self._turns[key] = call
        return Request(*key, context, of_turn, past, group.seed, group.priority)

    def refuse(self, call: EngineCall, request: Request, problem: str) -> None:
        """Tell an episode why the engine did not take the request of its turn."""
        del self._turns[request.uid, request.index]
        self._pool.refuse(call.task_id, call.call_id, problem)

    def show(self, output: StepOutput) -> None:
        """Show episodes that want to see them the tokens that a step of the engine has added."""
        if not any(call.streams for call in self._turns.values()):
            return
        uids, indices, tokens = (
            column.tolist() for column in (output.uids, output.indices, output.tokens)
        )
        for uid, index, token in zip(uids, indices, tokens, strict=True):
            call = self._turns.get((uid, index))
            if call is not None and call.streams:
                self._pool.show(call.task_id, call.call_id, [token])

    def cancel(self, event: TurnCancelled) -> list[Key]:
        """Forget a turn for which nobody waits, and return its request that the engine has."""
        keys = [key for key, call in self._turns.items() if call.call_id == event.call_id]
        for key in keys:
            del self._turns[key]
        return keys

    def answer(self, sample: Sample, text: str) -> bool:
        """Give a turn that the engine has finished to its episode; False if it is of none, or if
        its round has cut it.
        """
        key = sample.prompt_uid, sample.index
        if (call := self._turns.get(key)) is None or self._is_cut(sample, call):
            return False
        del self._turns[key]
        new = sample.data.cut(len(call.past))
        status: TurnStatus = "completed" if sample.status == "completed" else "truncated"
        self._pool.reply(call.task_id, call.call_id, Turn(new, text, status))
        return True

    def _is_cut(self, sample: Sample, call: EngineCall) -> bool:
        """Whether a turn ended because of the episode's round, which is over then."""
        if call.task_id not in self._left:
            return False
        self._left[call.task_id] -= len(sample.tokens) - len(call.past) - len(call.begun)
        group, _ = self._running[call.task_id]
        context = group.prompt.tokens if call.context is None else call.context
        of_turn = _turn_sampling(group.sampling, call.limits, len(call.past))
        most = min(of_turn.max_tokens, self._limits.context_tokens - len(context))
        if is_cut := ends_with_round(sample, most):
            self._ended_rounds.setdefault(call.task_id, []).append(sample)
        return is_cut

    def ended_rounds(self) -> list[tuple[int, list[Sample]]]:
        """Return the tasks whose round has ended since the last call, with the turns that were
        cut; each has to be paused.
        """
        ended = [item for item in self._ended_rounds.items() if item[0] in self._running]
        self._ended_rounds.clear()
        return ended

    def requests_of_task(self, task_id: int) -> list[Key]:
        """Return the requests of a task that are not answered."""
        return [key for key, call in self._turns.items() if call.task_id == task_id]

    def pause(self, task_id: int, turns: Iterable[Sample]) -> tuple[OpenGroup, Sample]:
        """End an episode that goes on in another round. Returns its group, and its sample without
        tokens, which has the progress of it; `turns` are what was drawn of its open requests.
        """
        group, index = self._running.pop(task_id)
        begun = self._begun(turns).get(task_id, {})
        sample = unstarted(group, index, self._pool.progress(task_id, begun))
        self._pool.cancel(task_id)
        self._turns_of(task_id)
        group.drawing.discard(index)
        return group, sample

    def new_tokens(self, sample: Sample) -> list[int]:
        """Return the tokens that a request of a turn has added."""
        call = self._turns.get((sample.prompt_uid, sample.index))
        return sample.tokens[len(call.past) if call else 0 :].tolist()

    def live_counts(self) -> dict[str, int]:
        """Return how many episodes wait for the engine, are at their own programs, and have ended.

        Those that have ended count from when the first of those beside them began. Any thread may
        call it.
        """
        drawing = len({call.task_id for call in list(self._turns.values())})
        outside = max(len(self._running) - drawing, 0)
        counts = {"drawing": drawing, "outside": outside, **dict(self._ended)}
        return {f"episodes/{name}": number for name, number in counts.items()}

    def owns(self, task_id: int) -> bool:
        return task_id in self._running

    def take(self, event: EpisodeEnded | Failed) -> tuple[OpenGroup, list[Sample], list[Key]]:
        """Act on the end of an episode.

        Returns its group, its samples, and the requests of it that the engine still has.
        Raises: DataError that names the function and the prompt, if failures raise.
        """
        group, index = self._running.pop(event.task_id)
        group.drawing.discard(index)
        left = self._turns_of(event.task_id)
        if isinstance(event, EpisodeEnded):
            self._ended[DONE] += 1
            return group, self._fitted(group, event), left
        self._ended[f"failed/{event.kind or UNKNOWN}"] += 1
        if self._raises and not event.is_spared:
            raise DataError(event.where, event.problem)
        group.fail(unstarted(group, index), event.error, event.kind)
        return group, [], left

    def _fitted(self, group: OpenGroup, event: EpisodeEnded) -> list[Sample]:
        """Return the samples that a trainer can take; the others fail."""
        samples = []
        for sample in event.samples:
            try:
                samples.append(self._limits.fitted(sample, len(group.prompt.tokens)))
            except BadResult as problem:
                if self._raises:
                    raise DataError(event.where, str(problem)) from None
                group.fail(unstarted(group, sample.index), f"{event.where}: {problem}")
        return samples

    def requests_of(self, group: OpenGroup) -> list[Key]:
        """Return the requests of a group's episodes that the engine has."""
        return [key for key, call in self._turns.items() if self._running[call.task_id][0] is group]

    def unfinished(self, group: OpenGroup, turns: Iterable[Sample]) -> list[Sample]:
        """Return the samples of a group's episodes without tokens, each with the progress of it.

        `turns` are what the engine has drawn so far of their requests.
        """
        begun = self._begun(turns)
        own = [(index, task) for task, (other, index) in self._running.items() if other is group]
        return [
            unstarted(group, index, self._pool.progress(task, begun.get(task, {})))
            for index, task in sorted(own)
        ]

    def _begun(self, turns: Iterable[Sample]) -> dict[int, dict[int, TokenData]]:
        """Return what the engine has drawn of open turns, by task and EngineCall."""
        begun: dict[int, dict[int, TokenData]] = {}
        for sample in turns:
            if call := self._turns.get((sample.prompt_uid, sample.index)):
                of_task = begun.setdefault(call.task_id, {})
                of_task[call.call_id] = sample.data.cut(len(call.past))
        return begun

    def forget(self, group: OpenGroup) -> None:
        """End a group's episodes, of whose requests the engine has none."""
        for task in [task for task, (other, _) in self._running.items() if other is group]:
            del self._running[task]
            self._pool.cancel(task)
            self._turns_of(task)

    def _turns_of(self, task_id: int) -> list[Key]:
        """Forget the turns of an episode, and return their requests."""
        keys = self.requests_of_task(task_id)
        for key in keys:
            del self._turns[key]
        self._left.pop(task_id, None)
        return keys


def unstarted(group: OpenGroup, index: int, progress: bytes = b"") -> Sample:
    """Return sample `index` of a group without a token, as an episode that has to begin again.

    `progress` is what the episode has drawn and kept so far.
    """
    return Sample(
        group.prompt.uid,
        index,
        NO_TOKENS,
        NO_LOGPROBS,
        NO_TOKENS,
        "aborted",
        temperature=group.sampling.scored_temperature,
        metadata={PROGRESS: progress} if progress else {},
    )


def with_turns(sample: Sample, text_of: Callable[[list[int]], str]) -> Sample:
    """Return a sample of several turns with these as messages; another one as it is.

    Where the episode has given none, they are its runs of tokens that were drawn, and of tokens
    that were observed, which are of the role "tool".
    """
    drawn = sample.versions != NO_VERSION
    if TURNS in sample.metadata or drawn.all():
        return sample
    starts = [0, *(np.flatnonzero(drawn[1:] != drawn[:-1]) + 1).tolist()]
    turns = [
        {"role": MODEL if drawn[start] else OBSERVED, "content": text_of(tokens.tolist())}
        for start, tokens in zip(starts, np.split(sample.tokens, starts[1:]), strict=True)
    ]
    return sample.replace(metadata={**sample.metadata, TURNS: turns})


@lru_cache(maxsize=1024)
def _turn_sampling(sampling: SamplingConfig, limits: TurnLimits, num_past: int) -> SamplingConfig:
    """Return the sampling of a turn; the limit of tokens counts those before it."""
    return replace(
        sampling,
        max_tokens=num_past + (limits.max_tokens or sampling.max_tokens),
        stop=sampling.stop if limits.stop is None else limits.stop,
        stop_ids=sampling.stop_ids + limits.stop_ids,
    )
