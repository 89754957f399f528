"""Reward tasks of a pool: each becomes a call of every function that fits, and then one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd_rl.hooks.rank.call_columns import CallRow, calls_message
from spmd_rl.hooks.rank.crews import Crews
from spmd_rl.hooks.rank.tasks import Failed, Graded, GroupTask, SampleTask
from spmd_rl.hooks.results import Grade, describe
from spmd_rl.hooks.wire.answer_ring import Rewards
from spmd_rl.hooks.wire.messages import Calls, Kind, Problem, Result
from spmd_rl.rewards.names import is_shipped
from spmd_rl.types.samples import Sample

_NO_METRICS: dict[str, float] = {}


class _OpenTask:
    """A task without an answer yet, and what its calls have brought so far."""

    __slots__ = ("calls", "grades", "metrics", "notes", "num_missing", "samples", "seconds", "task")

    def __init__(self, task: SampleTask | GroupTask) -> None:
        self.task = task
        self.samples: Sequence[Sample] = (
            (task.sample,) if type(task) is SampleTask else task.samples  # type: ignore[union-attr]
        )
        self.calls: list[int] = []
        self.num_missing = 0  # answers
        self.grades: dict[str, list[Grade]] = {}
        self.metrics: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.seconds = 0.0


_Call = tuple[int, _OpenTask, int, Kind]  # the id of the task, the task, the function, its kind


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
        queued: dict[Kind, list[int]] = {}
        for task_id in new:
            if (task := self._tasks.get(task_id)) is None:  # it was cancelled
                continue
            wanted = task.task.functions
            for number, kind in by_subject[type(task.task) is GroupTask]:
                if wanted is not None and number not in wanted:
                    continue
                call_id = next(self._ids)
                self._calls[call_id] = task_id, task, number, kind
                task.calls.append(call_id)
                task.num_missing += 1
                queued.setdefault(kind, []).append(call_id)
            if not task.calls:
                yield self._graded(task_id)
        for kind, call_ids in queued.items():
            self._crews.add(kind, call_ids)

    def message(self, call_ids: Iterable[int]) -> Calls:
        """Return the message that asks for these calls."""
        return calls_message(map(self._row, call_ids))

    def take(self, answer: Rewards | Result | Problem) -> Iterator[Graded | Failed]:
        """Yield the events of tasks that an answer completes or fails."""
        if isinstance(answer, Rewards):
            for call_id, seconds, reward in zip(*answer, strict=True):
                yield from self._complete(call_id, seconds, [Grade(reward)], _NO_METRICS)
        elif isinstance(answer, Result):
            call_id, seconds = answer.call_id, answer.seconds
            if answer.notes and (noted := self._calls.get(call_id)):
                noted[1].notes |= answer.notes
            yield from self._complete(call_id, seconds, answer.grades, answer.metrics)
        elif call := self._calls.pop(answer.call_id, None):
            task_id, task, function, _ = call
            task.seconds += answer.seconds
            self.cancel(task_id)
            name = self._names[function]
            where = f"reward {name} on {describe(task.task.prompt, task.samples)}"
            is_spared = answer.unanswered and is_shipped(name)
            yield Failed(task_id, where, answer.problem, task.seconds, is_spared)

    def _complete(
        self, call_id: int, seconds: float, grades: list[Grade], metrics: Mapping[str, float]
    ) -> Iterator[Graded]:
        """Take what a call returned; yield the event of its task if that was the last one."""
        if (call := self._calls.pop(call_id, None)) is None:  # it was cancelled
            return
        task_id, task, function, _ = call
        task.num_missing -= 1
        task.seconds += seconds
        task.grades[self._names[function]] = grades
        if metrics:
            task.metrics |= metrics
        if not task.num_missing:
            yield self._graded(task_id)

    def cancel(self, task_id: int) -> None:
        """Forget a task and its calls."""
        if task := self._tasks.pop(task_id, None):
            for call_id in task.calls:
                if call := self._calls.pop(call_id, None):
                    self._crews.drop(call[-1], call_id)

    def _row(self, call_id: int) -> CallRow:
        _, task, function, _ = self._calls[call_id]
        return call_id, function, task.task.prompt, task.samples, task.task.info

    def _graded(self, task_id: int) -> Graded:
        task = self._tasks.pop(task_id)
        return Graded(task_id, task.grades, task.metrics, task.seconds, task.notes)
