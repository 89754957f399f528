"""Reward tasks of a pool: each becomes a call of every function that fits, and then one event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd_rl.hooks.call_columns import CallRow, calls_message
from spmd_rl.hooks.crews import Crews
from spmd_rl.hooks.messages import Calls, Kind, Problem, Result
from spmd_rl.hooks.results import Grade, describe
from spmd_rl.hooks.tasks import Failed, Graded, GroupTask, SampleTask
from spmd_rl.types.samples import Sample


class _OpenTask:
    """A task without an answer yet, and what its calls have brought so far."""

    __slots__ = ("calls", "grades", "metrics", "samples", "seconds", "task")

    def __init__(self, task: SampleTask | GroupTask) -> None:
        self.task = task
        self.samples: Sequence[Sample] = (
            (task.sample,) if isinstance(task, SampleTask) else task.samples
        )
        self.calls: set[int] = set()
        self.grades: dict[str, list[Grade]] = {}
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0


class _Call(NamedTuple):
    """One function, by its number, for one task."""

    task_id: int
    function: int
    kind: Kind


class RewardTasks:
    """The reward tasks that are open. `names` are those of the functions; `ids` numbers calls."""

    def __init__(self, names: Sequence[str], crews: Crews, ids: Iterator[int]) -> None:
        self._names, self._crews, self._ids = names, crews, ids
        self._tasks: dict[int, _OpenTask] = {}
        self._calls: dict[int, _Call] = {}
        self._new: list[int] = []  # tasks without calls yet

    def __len__(self) -> int:
        return len(self._tasks)

    def open(self, task_id: int, task: SampleTask | GroupTask) -> None:
        """Take a task. The next `route` makes its calls."""
        self._tasks[task_id] = _OpenTask(task)
        self._new.append(task_id)

    def route(self) -> Iterator[Graded]:
        """Queue the calls of new tasks, once it is known what each function takes.

        Yields the event of a task that no function fits.
        """
        forms = self._crews.forms
        if forms is None or not self._new:
            return
        by_subject: dict[bool, list[tuple[int, Kind]]] = {False: [], True: []}
        for number, form in enumerate(forms):
            by_subject[form.whole_group].append((number, self._crews.kind_of(number)))
        new, self._new = self._new, []
        for task_id in new:
            if (task := self._tasks.get(task_id)) is None:  # it was cancelled
                continue
            for number, kind in by_subject[isinstance(task.task, GroupTask)]:
                call_id = next(self._ids)
                self._calls[call_id] = _Call(task_id, number, kind)
                task.calls.add(call_id)
                self._crews.add(kind, call_id)
            if not task.calls:
                yield self._graded(task_id)

    def message(self, call_ids: Sequence[int]) -> Calls:
        """Return the message that asks for these calls."""
        return calls_message(map(self._row, call_ids))

    def take(self, answer: Result | Problem) -> Iterator[Graded | Failed]:
        """Yield the event of a task that this answer completes or fails."""
        call = self._calls.pop(answer.call_id, None)
        if call is None:  # it was cancelled
            return
        task, name = self._tasks[call.task_id], self._names[call.function]
        task.calls.discard(answer.call_id)
        task.seconds += answer.seconds
        if isinstance(answer, Problem):
            self.cancel(call.task_id)
            where = f"reward {name} on {describe(task.task.prompt, task.samples)}"
            yield Failed(call.task_id, where, answer.problem, task.seconds)
            return
        task.grades[name] = answer.grades
        task.metrics |= answer.metrics
        if not task.calls:
            yield self._graded(call.task_id)

    def cancel(self, task_id: int) -> None:
        """Forget a task and its calls."""
        if task := self._tasks.pop(task_id, None):
            for call_id in task.calls:
                self._crews.drop(self._calls.pop(call_id).kind, call_id)

    def _row(self, call_id: int) -> CallRow:
        call = self._calls[call_id]
        task = self._tasks[call.task_id]
        return CallRow(call_id, call.function, task.task.prompt, task.samples, task.task.info)

    def _graded(self, task_id: int) -> Graded:
        task = self._tasks.pop(task_id)
        return Graded(task_id, task.grades, task.metrics, task.seconds)
