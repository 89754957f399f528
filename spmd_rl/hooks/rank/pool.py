"""Pool of a rank's hooks: it takes tasks, runs them in processes of their own, and never blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.crews import Crews
from spmd_rl.hooks.rank.episode_tasks import EpisodeTasks
from spmd_rl.hooks.rank.episode_texts import EpisodeTexts, EpisodeTokenizer
from spmd_rl.hooks.rank.reward_tasks import RewardTasks
from spmd_rl.hooks.rank.tasks import EpisodeTask, Event, Task
from spmd_rl.hooks.signatures import part_name
from spmd_rl.hooks.transcript import Turn
from spmd_rl.hooks.wire.answer_ring import Rewards
from spmd_rl.hooks.wire.messages import Kind, Problem, Result, Start, ToProcess


class HookPool(AbstractContextManager["HookPool"]):
    """Runs the hooks of one rank, whose main thread alone may use it. No method waits for a hook.

    `rewards` names the reward functions, and `config` is the recipe's config as plain nested data.
    `tokenizer` returns the tokenizer that answers episodes. First processes start at once, so that
    they import the hooks while the rank loads its model.
    """

    def __init__(
        self,
        cfg: HookConfig,
        rewards: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        tokenizer: Callable[[], EpisodeTokenizer] | None = None,
    ) -> None:
        start = Start(list(rewards), cfg.generate, dict(config or {}))
        self._ids = count()  # of tasks and calls
        self._crews = Crews(cfg, start, self._message_of)
        names = [part_name(name) for name in rewards]
        self._rewards = RewardTasks(names, self._crews, self._ids)
        texts = EpisodeTexts(tokenizer)
        self._episodes = EpisodeTasks(part_name(cfg.generate), texts, self._crews, self._ids)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def num_unfinished(self) -> int:
        """The number of tasks of which `poll` has not returned the last event."""
        return len(self._rewards) + len(self._episodes)

    @property
    def group_functions(self) -> frozenset[int]:
        """The numbers of the rewards that take a whole group; known once any sample is graded."""
        forms = enumerate(self._crews.forms or [])
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
        events: list[Event] = []
        for kind, messages in self._crews.read():
            for message in messages:
                if kind == "episode" and not isinstance(message, (Rewards, Result)):
                    events += self._episodes.take(message)
                elif isinstance(message, (Rewards, Result, Problem)):
                    events += self._rewards.take(message)
        events += self._rewards.route()
        self._crews.dispatch()
        return events

    def reply(self, task_id: int, call_id: int, turn: Turn) -> None:
        """Give an episode what the engine has drawn for its EngineCall."""
        self._episodes.reply(task_id, call_id, turn)

    def refuse(self, task_id: int, call_id: int, problem: str) -> None:
        """Tell an episode why the engine cannot answer its EngineCall; `complete` raises it."""
        self._episodes.reply(task_id, call_id, problem)

    def cancel(self, task_id: int) -> None:
        """Forget a task, of which there will be no event. A plain function that runs goes on."""
        self._rewards.cancel(task_id)
        self._episodes.cancel(task_id)

    def filenos(self) -> list[int]:
        """Return descriptors of which one can be read when `poll` has news."""
        return [self._crews.fileno()]

    def close(self) -> None:
        """End all processes. Blocks: until the system has ended them."""
        self._crews.close()

    def _message_of(self, kind: Kind, call_ids: list[int]) -> ToProcess:
        if kind == "episode":
            return self._episodes.message(call_ids)
        return self._rewards.message(call_ids)
