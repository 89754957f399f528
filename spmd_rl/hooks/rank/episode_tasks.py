"""Episode tasks of a pool: each is one call of `generate`, which asks the engine meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd_rl.hooks.rank.call_columns import EpisodeRow, episodes_message
from spmd_rl.hooks.rank.crews import Crews
from spmd_rl.hooks.rank.episode_texts import EpisodeTexts
from spmd_rl.hooks.rank.episode_turns import EpisodeTurns
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeEnded, EpisodeTask, Failed
from spmd_rl.hooks.results import describe_episode
from spmd_rl.hooks.transcript import Turn
from spmd_rl.hooks.wire.messages import (
    Ask,
    Drawn,
    EpisodeResult,
    Episodes,
    Kind,
    Problem,
    Question,
    Refused,
    ToProcess,
)

KIND: Kind = "episode"


class _OpenEpisode:
    """An episode that has not ended, and its turns."""

    def __init__(self, task: EpisodeTask) -> None:
        self.task = task
        self.turns = EpisodeTurns()


class EpisodeTasks:
    """The episodes that are open. The id of a task is that of its call. `name` is that of the
    function, `texts` answers for the tokenizer, and `ids` numbers engine calls.
    """

    def __init__(self, name: str, texts: EpisodeTexts, crews: Crews, ids: Iterator[int]) -> None:
        self._name, self._texts, self._crews, self._ids = name, texts, crews, ids
        self._tasks: dict[int, _OpenEpisode] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def open(self, task_id: int, task: EpisodeTask) -> None:
        """Take a task and queue its call."""
        self._tasks[task_id] = _OpenEpisode(task)
        self._crews.add(KIND, [task_id])

    def message(self, call_ids: Sequence[int]) -> Episodes:
        """Return the message that asks for these episodes, from their start."""
        return episodes_message(map(self._row, call_ids))

    def take(
        self, message: Ask | Question | EpisodeResult | Problem
    ) -> Iterator[EngineCall | EpisodeEnded | Failed]:
        """Yield the event that a message of an episode leads to, if any."""
        task_id = message.call_id
        if task_id not in self._tasks:  # it was cancelled
            return
        if isinstance(message, Ask):
            yield from self._asked(message)
        elif isinstance(message, Question):
            self._send(task_id, self._texts.answer(message))
        elif isinstance(message, EpisodeResult):
            task = self._tasks.pop(task_id).task
            told = {"metrics": message.metrics, "notes": message.notes}
            added = {name: values for name, values in told.items() if values}
            samples = [
                sample.replace(metadata=sample.metadata | added)
                for sample in message.samples.rows()
            ]
            yield EpisodeEnded(task_id, samples, message.seconds, self._where(task))
        else:
            task = self._tasks.pop(task_id).task
            yield Failed(task_id, self._where(task), message.problem, message.seconds)

    def reply(self, task_id: int, call_id: int, turn: Turn | str) -> None:
        """Give an episode a turn, or the reason why there is none. One that has ended gets none."""
        if (episode := self._tasks.get(task_id)) is None:
            return
        if (ask_id := episode.turns.answer(call_id, turn)) is not None:
            self._send(task_id, _answer(task_id, ask_id, turn))

    def cancel(self, task_id: int) -> None:
        """Forget a task and its call."""
        if self._tasks.pop(task_id, None):
            self._crews.drop(KIND, task_id)

    def _where(self, task: EpisodeTask) -> str:
        return f"generate {self._name} on {describe_episode(task.prompt, task.index)}"

    def _row(self, task_id: int) -> EpisodeRow:
        episode = self._tasks[task_id]
        episode.turns.restart()
        task = episode.task
        return EpisodeRow(
            task_id, task.prompt, task.index, task.num_samples, task.temperature, task.info
        )

    def _asked(self, message: Ask) -> Iterator[EngineCall]:
        """Answer a question from what was drawn before, or ask the engine."""
        task_id, engine_call = message.call_id, next(self._ids)
        known = self._tasks[task_id].turns.ask(message, engine_call)
        if isinstance(known, bool):
            if known:
                yield EngineCall(
                    task_id,
                    engine_call,
                    message.transcript,
                    message.tokens,
                    message.logprobs,
                    message.versions,
                    message.kept,
                    message.max_tokens,
                    None if message.stop is None else tuple(message.stop),
                )
        else:
            self._send(task_id, _answer(task_id, message.ask_id, known))

    def _send(self, task_id: int, message: ToProcess) -> None:
        self._crews.send(KIND, task_id, message)


def _answer(call_id: int, ask_id: int, turn: Turn | str) -> ToProcess:
    if isinstance(turn, str):
        return Refused(call_id, ask_id, turn)
    return Drawn(call_id, ask_id, turn)
