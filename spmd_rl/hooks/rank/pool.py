"""Pool of a rank's hooks: it takes tasks, runs them in processes of their own, and never blocks."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from msgspec.structs import replace

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.episode_tasks import EpisodeTasks
from spmd_rl.hooks.rank.reward_tasks import RewardTasks
from spmd_rl.hooks.rank.tasks import EpisodeTask, Event, Task
from spmd_rl.hooks.rank.worker import HookWorker
from spmd_rl.hooks.rank.worker_group import Limits, WorkerGroup
from spmd_rl.hooks.signatures import part_name
from spmd_rl.hooks.transcript import Turn
from spmd_rl.hooks.wire.messages import (
    Answers,
    AskTurn,
    CancelTurn,
    KeepResult,
    Ready,
    Start,
    ToRank,
)
from spmd_rl.types.token_data import TokenData

LATE_STEP = "held its event loop for longer than {:g} s without an await"


class HookPool(AbstractContextManager["HookPool"]):
    """Runs the hooks of one rank, whose main thread alone may use it. No method waits for a hook.

    `rewards` names the reward functions, and `config` is the recipe's config as plain nested data.
    `rank` is that of this worker, and `model` the folder of the run's model, whose tokenizer serves
    episodes. First processes start at once, so that they import the hooks while the rank loads its
    model.
    """

    def __init__(
        self,
        cfg: HookConfig,
        rewards: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        rank: int = 0,
        model: str = "",
    ) -> None:
        deadlines = cfg.concurrency, cfg.deadline_s, cfg.episode_deadline_s
        self._start = Start(list(rewards), "", dict(config or {}), rank, model, *deadlines)
        self._selector = selectors.DefaultSelector()
        late = Limits(cfg.processes, cfg.concurrency, cfg.deadline_s, LATE_STEP)
        plain = Limits(cfg.processes, 0, cfg.deadline_s)
        # The kind of a reward function is known once a process has imported it. So the first
        # process of rewards starts as a plain one.
        self._plain = WorkerGroup(plain, self._reward_worker)
        self._async = WorkerGroup(late, self._reward_worker)
        episode = replace(self._start, rewards=[], generate=cfg.generate)
        late = late._replace(late_kind="timeout")
        self._episode = WorkerGroup(late, lambda: HookWorker(episode, self._selector))
        self._ids = ids = count()  # of tasks and calls
        names = [part_name(name) for name in rewards]
        self._rewards = RewardTasks(names, self._plain, self._async, ids)
        self._episodes = EpisodeTasks(part_name(cfg.generate), self._episode, ids)
        if rewards:
            self._plain.start()
        if cfg.generate:
            self._episode.start()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def num_unfinished(self) -> int:
        """The number of tasks of which `poll` has not returned the last event."""
        return len(self._rewards) + len(self._episodes)

    @property
    def group_functions(self) -> frozenset[int]:
        """The numbers of the rewards that take a whole group; known once any sample is graded."""
        forms = enumerate(self._rewards.forms or [])
        return frozenset(number for number, form in forms if form.whole_group)

    def submit(self, task: Task) -> int:
        """Take a task and return its id, by which events of `poll` name it.

        The next `poll` sends it, so tasks that are submitted together travel together.
        """
        task_id = next(self._ids)
        if isinstance(task, EpisodeTask):
            self._episodes.open(task_id, task)
        else:
            self._rewards.open(task_id, task)
        return task_id

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, and send what was submitted.

        It must be called a few times a second, even without news, because deadlines may be due.
        Raises: ConfigError when a hook cannot be imported; SpmdError when a process cannot start.
        """
        now_s = time.monotonic()
        events: list[Event] = []
        for group in self._groups():
            for worker, message in list(group.read(now_s)):
                events += self._events(worker, message)
        events += self._rewards.route()
        for group in (self._plain, self._async):
            for worker, call_ids in group.assign(now_s):
                worker.send(self._rewards.message(call_ids))
        for worker, call_ids in self._episode.assign(now_s):
            for call_id in call_ids:
                worker.send(self._episodes.message(call_id))
        return events

    def reply(self, task_id: int, call_id: int, turn: Turn) -> None:
        """Give an episode what the engine has drawn for its EngineCall."""
        self._episodes.reply(task_id, call_id, turn)

    def show(self, task_id: int, call_id: int, tokens: list[int]) -> None:
        """Show an episode new tokens of the turn that its EngineCall asked for."""
        self._episodes.show(task_id, call_id, tokens)

    def refuse(self, task_id: int, call_id: int, problem: str) -> None:
        """Tell an episode why the engine cannot answer its EngineCall; `complete` raises it."""
        self._episodes.reply(task_id, call_id, None, problem)

    def progress(self, task_id: int, begun: Mapping[int, TokenData]) -> bytes:
        """Return what an episode has drawn and kept so far, for `EpisodeTask.progress`.

        `begun` are the tokens so far of turns that the engine draws now, by their EngineCall.
        """
        return self._episodes.progress(task_id, begun)

    def cancel(self, task_id: int) -> None:
        """Forget a task, of which there will be no event. A plain function that runs goes on."""
        self._rewards.cancel(task_id)
        self._episodes.cancel(task_id)

    def filenos(self) -> list[int]:
        """Return descriptors of which one can be read when `poll` has news."""
        return [self._selector.fileno()]

    def close(self) -> None:
        """End all processes. Blocks: until the system has ended them."""
        for group in self._groups():
            group.close()
        self._selector.close()

    def _groups(self) -> tuple[WorkerGroup, ...]:
        return self._plain, self._async, self._episode

    def _reward_worker(self) -> HookWorker:
        return HookWorker(self._start, self._selector)

    def _events(self, worker: HookWorker, message: ToRank) -> Iterator[Event]:
        """Yield the events that a message of a worker leads to."""
        if isinstance(message, Answers):
            for answer in message.answers:
                tasks = self._episodes if answer.call_id in self._episodes else self._rewards
                yield from tasks.take(answer)
        elif isinstance(message, AskTurn | CancelTurn | KeepResult):
            yield from self._episodes.take(message)
        elif isinstance(message, Ready) and worker in self._plain.workers:
            self._rewards.forms = message.forms
            if all(form.is_async for form in message.forms):
                self._plain.workers.remove(worker)
                self._async.workers.append(worker)
