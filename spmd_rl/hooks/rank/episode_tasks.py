"""Episode tasks of a pool: each is one call of `generate`, which asks the engine meanwhile.

A process that ended through another call runs its episodes again from their start. They then get
the turns that the engine has drawn already, so that nothing is drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spmd_rl.hooks.rank.progress import Progress, TurnKey
from spmd_rl.hooks.rank.tasks import (
    EngineCall,
    EpisodeEnded,
    EpisodeTask,
    Failed,
    TurnCancelled,
)
from spmd_rl.hooks.rank.worker_group import WorkerGroup
from spmd_rl.hooks.results import describe_episode
from spmd_rl.hooks.transcript import Turn
from spmd_rl.hooks.wire.messages import (
    Answer,
    AskTurn,
    CancelTurn,
    DrawnTokens,
    Episode,
    KeepResult,
    Problem,
    Reply,
)
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.token_data import NO_DATA, TokenData

EpisodeEvent = EngineCall | TurnCancelled | EpisodeEnded | Failed


class _OpenEpisode:
    """An episode that has not ended, and its turns."""

    def __init__(self, task: EpisodeTask) -> None:
        self.task = task
        self.progress = Progress.decoded(task.progress)
        self.refused: dict[TurnKey, str] = {}  # by the engine, and why
        self.asked: dict[int, TurnKey] = {}  # what the engine draws now, by its EngineCall
        self.waiting: dict[TurnKey, int] = {}  # the ask id under which the function waits


class EpisodeTasks:
    """The episodes that are open. The id of a task is that of its call. `name` is that of the
    function, and `ids` numbers engine calls.
    """

    def __init__(self, name: str, group: WorkerGroup, ids: Iterator[int]) -> None:
        self._name, self._group, self._ids = name, group, ids
        self._tasks: dict[int, _OpenEpisode] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._tasks

    def open(self, task_id: int, task: EpisodeTask) -> None:
        """Take a task and queue its call. Raises: ContractError for a progress that is none."""
        self._tasks[task_id] = _OpenEpisode(task)
        self._group.add([task_id])

    def message(self, task_id: int) -> Episode:
        """Return the message that asks for an episode, from its start."""
        episode = self._tasks[task_id]
        episode.waiting.clear()
        task = episode.task
        which = task.info, task.index, task.num_samples, task.temperature
        results = episode.progress.results
        return Episode(task_id, *which, Prompt.to_columns([task.prompt]), results)

    def progress(self, task_id: int, begun: Mapping[int, TokenData]) -> bytes:
        """Return what an episode has drawn and kept, b"" for one that has ended. `begun` are the
        tokens so far of turns that the engine draws now, by their EngineCall.
        """
        if (episode := self._tasks.get(task_id)) is None:
            return b""
        keys = {episode.asked[call_id]: data for call_id, data in begun.items()}
        return episode.progress.encoded(keys)

    def take(self, message: AskTurn | CancelTurn | KeepResult | Answer) -> Iterator[EpisodeEvent]:
        """Yield the event that a message of an episode leads to, if any."""
        task_id = message.call_id
        if task_id not in self._tasks:  # it was cancelled
            return
        if isinstance(message, AskTurn):
            yield from self._asked(message)
        elif isinstance(message, CancelTurn):
            yield from self._cancelled(message)
        elif isinstance(message, KeepResult):
            self._tasks[task_id].progress.results[message.name] = message.value
        else:
            task = self._tasks.pop(task_id).task
            where = f"generate {self._name} on {describe_episode(task.prompt, task.index)}"
            if isinstance(message, Problem):
                # it has ended its process; what is late says so itself
                kind = message.kind or ("agent" if message.unanswered else None)
                is_spared = kind is not None
                yield Failed(task_id, where, message.problem, message.seconds, is_spared, kind)
            elif message.samples is not None:
                told = {"metrics": message.metrics, "notes": message.notes}
                added = {name: values for name, values in told.items() if values}
                samples = message.samples.rows()
                samples = [one.replace(metadata=one.metadata | added) for one in samples]
                yield EpisodeEnded(task_id, samples, message.seconds, where)

    def reply(self, task_id: int, call_id: int, turn: Turn | None, problem: str = "") -> None:
        """Give an episode a turn, or the reason why there is none. One that has ended gets none."""
        if episode := self._tasks.get(task_id):
            key = episode.asked.pop(call_id)
            episode.progress.begun.pop(key, None)
            if turn is None:
                episode.refused[key] = problem
            else:
                episode.progress.turns[key] = turn
            if (ask_id := episode.waiting.pop(key, None)) is not None:
                self._send(Reply(task_id, ask_id, problem, turn))

    def show(self, task_id: int, call_id: int, tokens: list[int]) -> None:
        """Show an episode new tokens of its turn, if it still waits for it."""
        if episode := self._tasks.get(task_id):
            ask_id = episode.waiting.get(episode.asked[call_id])
            if ask_id is not None:
                self._send(DrawnTokens(task_id, ask_id, tokens))

    def cancel(self, task_id: int) -> None:
        """Forget a task and its call."""
        if self._tasks.pop(task_id, None):
            self._group.cancel(task_id)

    def _asked(self, message: AskTurn) -> Iterator[EngineCall]:
        """Answer a question from what was drawn before, or ask the engine."""
        task_id, episode = message.call_id, self._tasks[message.call_id]
        key = TurnKey.of(message)
        turn, problem = episode.progress.turns.get(key), episode.refused.get(key)
        if turn is not None or problem is not None:
            self._send(Reply(task_id, message.ask_id, problem or "", turn))
            return
        episode.waiting[key] = message.ask_id
        if key in episode.asked.values():  # the engine draws it already
            return
        call_id = next(self._ids)
        episode.asked[call_id] = key
        begun = episode.progress.begun.get(key, NO_DATA)
        if message.streams and len(begun):
            self.show(task_id, call_id, begun.tokens.tolist())
        yield EngineCall(
            task_id,
            call_id,
            message.transcript,
            message.past,
            message.limits,
            message.context,
            message.streams,
            begun,
        )

    def _cancelled(self, message: CancelTurn) -> Iterator[TurnCancelled]:
        """Forget a question that the engine has not answered."""
        episode = self._tasks[message.call_id]
        waiting = {ask_id: key for key, ask_id in episode.waiting.items()}
        key = waiting.get(message.ask_id)
        for call_id, asked in list(episode.asked.items()):
            if asked == key:
                del episode.asked[call_id], episode.waiting[key]
                yield TurnCancelled(message.call_id, call_id)

    def _send(self, message: Reply | DrawnTokens) -> None:
        if worker := self._group.worker_of(message.call_id):
            worker.send(message)
