"""Episode tasks of a pool: each is one call of `generate`, which asks the engine meanwhile.

A process that ended through another call runs its episodes again from their start. They then get
the turns that the engine has drawn already, so that nothing is drawn twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from spmd_rl.data.render.chat import Chat, Template, render
from spmd_rl.data.render.messages import messages_of, tools_of
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeEnded, EpisodeTask, Failed
from spmd_rl.hooks.rank.worker_group import WorkerGroup
from spmd_rl.hooks.results import describe_episode
from spmd_rl.hooks.wire.messages import Answer, AskTexts, AskTurn, Episode, Problem, Reply
from spmd_rl.types.prompts import Prompt

# what an episode asked the engine: transcript, digest of its tokens, max_tokens and stop
_TurnKey = tuple[int, bytes, int | None, tuple[str, ...] | None]


class EpisodeTokenizer(Template, Protocol):
    """The part of a tokenizer that episodes need."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class _OpenEpisode:
    """An episode that has not ended, and its turns."""

    def __init__(self, task: EpisodeTask) -> None:
        self.task = task
        self.replies: dict[_TurnKey, dict[str, Any]] = {}  # of the engine
        self.asked: dict[int, _TurnKey] = {}  # what the engine draws now, by its call
        self.waiting: dict[_TurnKey, int] = {}  # the ask id under which the function waits


class EpisodeTasks:
    """The episodes that are open. The id of a task is that of its call. `name` is that of the
    function, `tokenizer` returns the one that answers for texts, and `ids` numbers engine calls.
    """

    def __init__(
        self, name: str, tokenizer: Callable[[], Any] | None, group: WorkerGroup, ids: Iterator[int]
    ) -> None:
        self._name, self._tokenizer, self._group, self._ids = name, tokenizer, group, ids
        self._tasks: dict[int, _OpenEpisode] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._tasks

    def open(self, task_id: int, task: EpisodeTask) -> None:
        """Take a task and queue its call."""
        self._tasks[task_id] = _OpenEpisode(task)
        self._group.add([task_id])

    def message(self, task_id: int) -> Episode:
        """Return the message that asks for an episode, from its start."""
        episode = self._tasks[task_id]
        episode.waiting.clear()
        task = episode.task
        which = task.info, task.index, task.num_samples, task.temperature
        return Episode(task_id, *which, Prompt.to_columns([task.prompt]))

    def take(
        self, message: AskTurn | AskTexts | Answer
    ) -> Iterator[EngineCall | EpisodeEnded | Failed]:
        """Yield the event that a message of an episode leads to, if any."""
        task_id = message.call_id
        if task_id not in self._tasks:  # it was cancelled
            return
        if isinstance(message, AskTurn):
            yield from self._asked(message)
        elif isinstance(message, AskTexts):
            self._send(reply_of(message, self._tokenizer))
        else:
            task = self._tasks.pop(task_id).task
            where = f"generate {self._name} on {describe_episode(task.prompt, task.index)}"
            if isinstance(message, Problem):
                yield Failed(task_id, where, message.problem, message.seconds)
            elif message.samples is not None:
                told = {"metrics": message.metrics, "notes": message.notes}
                added = {name: values for name, values in told.items() if values}
                samples = message.samples.rows()
                samples = [one.replace(metadata=one.metadata | added) for one in samples]
                yield EpisodeEnded(task_id, samples, message.seconds, where)

    def reply(self, task_id: int, call_id: int, **reply: Any) -> None:
        """Give an episode a turn, or the reason why there is none. One that has ended gets none."""
        if episode := self._tasks.get(task_id):
            key = episode.asked.pop(call_id)
            episode.replies[key] = reply
            if (ask_id := episode.waiting.pop(key, None)) is not None:
                self._send(Reply(task_id, ask_id, **reply))

    def cancel(self, task_id: int) -> None:
        """Forget a task and its call."""
        if self._tasks.pop(task_id, None):
            self._group.cancel(task_id)

    def _asked(self, message: AskTurn) -> Iterator[EngineCall]:
        """Answer a question from what was drawn before, or ask the engine."""
        task_id, episode = message.call_id, self._tasks[message.call_id]
        past = blake2b(message.past.tokens.tobytes()).digest()
        key = message.transcript, past, message.max_tokens, message.stop
        if key in episode.replies:
            self._send(Reply(task_id, message.ask_id, **episode.replies[key]))
            return
        episode.waiting[key] = message.ask_id
        if key not in episode.asked.values():  # else the engine draws it already
            call_id = next(self._ids)
            episode.asked[call_id] = key
            yield EngineCall(
                task_id,
                call_id,
                message.transcript,
                message.past,
                message.max_tokens,
                message.stop,
            )

    def _send(self, message: Reply) -> None:
        if worker := self._group.worker_of(message.call_id):
            worker.send(message)


def reply_of(question: AskTexts, tokenizer: Callable[[], EpisodeTokenizer] | None) -> Reply:
    """Return the tokenizer's answer to a question, or why there is none."""
    ids = question.call_id, question.ask_id
    if tokenizer is None:
        return Reply(*ids, "there is no tokenizer here")
    if question.text is not None:
        (tokens,) = tokenizer()([question.text], add_special_tokens=False)["input_ids"]
        return Reply(*ids, tokens=list(tokens))
    if question.chat is None:
        try:
            return Reply(*ids, text=tokenizer().decode(np.array(question.tokens).tolist()))
        # a tokenizer may raise anything on an id that it does not have
        except Exception as error:  # noqa: BLE001
            return Reply(*ids, f"decode: {type(error).__name__}: {error}")
    messages, tools, template_kwargs = question.chat
    try:
        turns = messages_of("messages", messages)
        chat = Chat("messages", turns, tools_of("tools", tools), template_kwargs)
        return Reply(*ids, text=render(chat, tokenizer(), generation_prompt=True))
    except SpmdError as error:
        return Reply(*ids, str(error))
