"""Pool of a rank's hooks: it takes tasks, runs them in processes of their own, and never blocks."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from spmd_rl.hooks.call_columns import CallRow, calls_message
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.crew import Crew, Hands, Limits, Member, Place
from spmd_rl.hooks.messages import Kind, Problem, Ready, Result, Serve, Start
from spmd_rl.hooks.process import HookProcess
from spmd_rl.hooks.results import Grade, describe
from spmd_rl.hooks.signatures import RewardForm, part_name
from spmd_rl.hooks.tasks import Event, Failed, Graded, SampleTask, Task


class _OpenTask:
    """A task without an answer yet, and what its calls have brought so far."""

    __slots__ = ("calls", "grades", "metrics", "samples", "seconds", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.samples = (task.sample,) if isinstance(task, SampleTask) else task.samples
        self.calls: set[int] = set()
        self.grades: dict[str, list[Grade]] = {}
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0


class _Call(NamedTuple):
    """One function for one task."""

    task_id: int
    function: int
    kind: Kind


class HookPool(AbstractContextManager["HookPool"]):
    """Runs the hooks of one rank, whose main thread alone may use it. No method waits for a hook.

    `rewards` names the reward functions, and `config` is the recipe's config as plain nested data.
    A first process starts at once, so that it imports the hooks while the rank loads its model.
    """

    def __init__(
        self, cfg: HookConfig, rewards: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._cfg, self._names = cfg, [part_name(name) for name in rewards]
        self._selector = selectors.DefaultSelector()
        self._start = Start(list(rewards), "", dict(config or {}))
        self._forms: list[RewardForm] | None = None if rewards else []  # the first process tells
        self._crews: dict[Kind, Crew] = {"plain": self._crew("plain", 0)}
        self._ids = count()
        self._tasks: dict[int, _OpenTask] = {}
        self._calls: dict[int, _Call] = {}
        self._unrouted: list[int] = []  # tasks since the last poll
        if rewards:
            self._crews["plain"].start(time.monotonic())

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    @property
    def num_unfinished(self) -> int:
        """The number of tasks of which `poll` has not returned the event."""
        return len(self._tasks)

    @property
    def grades_groups(self) -> bool:
        """Whether a reward takes a whole group; known once any task is graded."""
        return any(form.whole_group for form in self._forms or [])

    def submit(self, task: Task) -> int:
        """Take a task and return its id, by which an event of `poll` names it.

        The next `poll` sends it, so tasks that are submitted together travel together.
        """
        task_id = next(self._ids)
        self._tasks[task_id] = _OpenTask(task)
        self._unrouted.append(task_id)
        return task_id

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, and send what was submitted.

        Raises: ConfigError when a hook cannot be imported; SpmdError when a process cannot start.
        """
        now_s = time.monotonic()
        news = {key.data for key, _ in self._selector.select(0)}
        events: list[Event] = []
        for crew in self._crews.values():
            for answer in crew.read(now_s, news):
                events += self._event_of(answer)
        events += self._route()
        for crew in self._crews.values():
            crew.dispatch(now_s)
        return events

    def cancel(self, task_id: int) -> None:
        """Forget a task, of which there will be no event. A plain function that runs goes on."""
        if task := self._tasks.pop(task_id, None):
            self._forget_calls(task)

    def filenos(self) -> list[int]:
        """Return descriptors of which one can be read when `poll` has news."""
        return [self._selector.fileno()]

    def wait_s(self) -> float | None:
        """Return the seconds after which `poll` must be called although it has no news, because a
        deadline is due; None: there is none.
        """
        now_s = time.monotonic()
        waits = [wait for crew in self._crews.values() if (wait := crew.wait_s(now_s)) is not None]
        return min(waits, default=None)

    def close(self) -> None:
        """End all processes and forget all tasks. Blocks: until the system has ended them."""
        for crew in self._crews.values():
            crew.close()
        self._tasks.clear()
        self._calls.clear()
        self._selector.close()

    def _crew(self, kind: Kind, slots: int) -> Crew:
        hands = Hands(self._new_process, partial(self._introduce, kind), self._send)
        return Crew(Limits(self._cfg.processes, slots, self._cfg.deadline_s), hands)

    def _new_process(self) -> Member:
        return HookProcess(self._start, self._selector)

    def _introduce(self, kind: Kind, place: Place, ready: Ready) -> None:
        self._forms = ready.forms
        cfg = self._cfg
        place.member.send(Serve(kind, cfg.concurrency, cfg.deadline_s, cfg.episode_deadline_s))

    def _route(self) -> Iterator[Graded]:
        """Make the calls of new tasks, once it is known what each function takes."""
        if self._forms is None:
            return
        for task_id in self._unrouted:
            if (task := self._tasks.get(task_id)) is None:
                continue
            takes_group = not isinstance(task.task, SampleTask)
            for number, form in enumerate(self._forms):
                if form.whole_group == takes_group:
                    call_id = next(self._ids)
                    self._calls[call_id] = _Call(task_id, number, "plain")
                    task.calls.add(call_id)
                    self._crews["plain"].add(call_id)
            if not task.calls:
                yield self._graded(task_id)
        self._unrouted.clear()

    def _send(self, place: Place, call_ids: list[int]) -> None:
        place.member.send(calls_message(map(self._row, call_ids)))

    def _row(self, call_id: int) -> CallRow:
        call = self._calls[call_id]
        task = self._tasks[call.task_id]
        return CallRow(call_id, call.function, task.task.prompt, task.samples, task.task.info)

    def _event_of(self, answer: Result | Problem) -> Iterator[Event]:
        """Yield the event of a task that this answer completes or fails."""
        call = self._calls.pop(answer.call_id, None)
        if call is None:  # it was cancelled
            return
        task, name = self._tasks[call.task_id], self._names[call.function]
        task.calls.discard(answer.call_id)
        task.seconds += answer.seconds
        if isinstance(answer, Problem):
            del self._tasks[call.task_id]
            self._forget_calls(task)
            where = f"reward {name} on {describe(task.task.prompt, task.samples)}"
            yield Failed(call.task_id, where, answer.problem, task.seconds)
            return
        task.grades[name] = answer.grades
        task.metrics |= answer.metrics
        if not task.calls:
            yield self._graded(call.task_id)

    def _graded(self, task_id: int) -> Graded:
        task = self._tasks.pop(task_id)
        return Graded(task_id, task.grades, task.metrics, task.seconds)

    def _forget_calls(self, task: _OpenTask) -> None:
        for call_id in task.calls:
            call = self._calls.pop(call_id)
            self._crews[call.kind].drop(call_id)
