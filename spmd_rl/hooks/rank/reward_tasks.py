"""Reward tasks of a pool: each becomes a call of every function that fits, and then one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spmd_rl.hooks.rank.tasks import Failed, Graded, GroupTask, SampleTask
from spmd_rl.hooks.rank.worker_group import WorkerGroup
from spmd_rl.hooks.results import Grade, describe
from spmd_rl.hooks.signatures import RewardForm
from spmd_rl.hooks.wire.messages import CallRow, Calls, Problem, Result
from spmd_rl.rewards.names import is_shipped
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_NOTHING: dict[str, Any] = {}  # most functions emit and note nothing


class _OpenTask:
    """A task without an answer yet, and what its calls have brought so far."""

    __slots__ = ("calls", "grades", "metrics", "notes", "num_missing", "samples", "seconds", "task")

    def __init__(self, task: SampleTask | GroupTask) -> None:
        self.task = task
        self.samples = [task.sample] if isinstance(task, SampleTask) else task.samples
        self.calls: list[int] = []
        self.num_missing = 0  # answers
        self.grades: dict[str, list[Grade]] = {}
        self.metrics: dict[str, float] = _NOTHING
        self.notes: dict[str, str] = _NOTHING
        self.seconds = 0.0


# the id of the task, the task, the number of the function, and whether that is async
_Call = tuple[int, _OpenTask, int, bool]


class RewardTasks:
    """The reward tasks that are open. `names` are those of the functions; `ids` numbers calls.

    The kind of a function is known once a process has imported it: `forms` is None until then.
    """

    def __init__(
        self,
        names: Sequence[str],
        plain: WorkerGroup,
        asynchronous: WorkerGroup,
        ids: Iterator[int],
    ) -> None:
        self.forms: list[RewardForm] | None = None if names else []
        self._names, self._groups, self._ids = names, (plain, asynchronous), ids
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
        if self.forms is None or not self._new:
            return
        fitting: dict[bool, list[tuple[int, bool]]] = {False: [], True: []}
        for number, form in enumerate(self.forms):
            fitting[form.whole_group].append((number, form.is_async))
        queued: tuple[list[int], list[int]] = [], []
        for task_id in self._new:
            if (task := self._tasks.get(task_id)) is None:  # it was cancelled
                continue
            wanted = task.task.functions
            for number, is_async in fitting[type(task.task) is GroupTask]:
                if wanted is None or number in wanted:
                    call_id = next(self._ids)
                    self._calls[call_id] = task_id, task, number, is_async
                    task.calls.append(call_id)
                    queued[is_async].append(call_id)
            task.num_missing = len(task.calls)
            if not task.calls:
                yield self._graded(task_id)
        self._new = []
        for group, call_ids in zip(self._groups, queued, strict=True):
            group.add(call_ids)

    def message(self, call_ids: Iterable[int]) -> Calls:
        """Return the message that asks for these calls. Each prompt and sample is in it once."""
        calls, prompts, samples = list[CallRow](), list[Prompt](), list[Sample]()
        places: dict[int, int] = {}  # of prompts and of sequences of samples, by their id
        for call_id in call_ids:
            _, open_task, function, _ = self._calls[call_id]
            task, sequence = open_task.task, open_task.samples
            if (prompt := places.setdefault(id(task.prompt), len(prompts))) == len(prompts):
                prompts.append(task.prompt)
            if (first := places.setdefault(id(sequence), len(samples))) == len(samples):
                samples += sequence
            calls.append(CallRow(call_id, function, task.info, prompt, first, len(sequence)))
        return Calls(calls, Prompt.to_columns(prompts), Sample.to_columns(samples))

    def take(self, answer: Result | Problem) -> Iterator[Graded | Failed]:
        """Yield the event of the task that an answer completes or fails."""
        if (call := self._calls.pop(answer.call_id, None)) is None:  # it was cancelled
            return
        task_id, task, function, _ = call
        task.seconds += answer.seconds
        name = self._names[function]
        if isinstance(answer, Problem):
            self.cancel(task_id)
            where = f"reward {name} on {describe(task.task.prompt, task.samples)}"
            is_spared = answer.unanswered and is_shipped(name)
            yield Failed(task_id, where, answer.problem, task.seconds, is_spared)
            return
        task.num_missing -= 1
        task.grades[name] = answer.grades
        if answer.metrics or answer.notes:
            task.metrics = task.metrics | answer.metrics
            task.notes = task.notes | answer.notes
        if not task.num_missing:
            yield self._graded(task_id)

    def cancel(self, task_id: int) -> None:
        """Forget a task and its calls. A plain function that runs goes on."""
        if task := self._tasks.pop(task_id, None):
            for call_id in task.calls:
                if call := self._calls.pop(call_id, None):
                    self._groups[call[-1]].cancel(call_id)

    def _graded(self, task_id: int) -> Graded:
        task = self._tasks.pop(task_id)
        return Graded(task_id, task.grades, task.metrics, task.seconds, task.notes)
