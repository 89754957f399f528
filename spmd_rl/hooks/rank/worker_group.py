"""Workers of one kind of hooks: what each is sent, and which call the end of one is charged to.

A call is answered once. It is made again only if its worker ended, or was damaged, through another
call. Where nobody knows which call it was, each is made alone until one ends a fresh worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.failures import FailureKind
from spmd_rl.hooks.rank.worker import HookWorker
from spmd_rl.hooks.wire.channel import NO_CALL
from spmd_rl.hooks.wire.messages import Answer, Answers, Cancel, Problem, Ready, ToRank

AHEAD_S = 0.05  # of work that a worker is sent at once; another is started if more waits so long
MAX_AHEAD = 256  # calls, which wait even if the one before them turns out to be slow
START_DEADLINE_S = 600.0  # for a process to import the hooks
_NEWEST = 0.1  # weight of the newest call in the mean time of calls


class Limits(NamedTuple):
    """Bounds of a group. `concurrency` is the calls at once in a worker; 0 for plain functions."""

    workers: int
    concurrency: int
    deadline_s: float  # of one uninterrupted run of a hook; 0: none
    late: str = "took longer than {:g} s"  # what is said of a call that missed the deadline
    late_kind: FailureKind | None = None  # of such a call


class WorkerGroup:
    """The workers of one kind, and the calls that wait for them. Times are in seconds of one
    monotonic clock.
    """

    def __init__(self, limits: Limits, new_worker: Callable[[], HookWorker]) -> None:
        self.workers: list[HookWorker] = []
        self._limits, self._new_worker = limits, new_worker
        self._late = limits.late.format(limits.deadline_s)
        self._waiting: deque[int] = deque()
        self._doubted: deque[int] = deque()  # each is made alone in a worker
        self._mean_s = 0.0  # of a call; 0: not known
        self._behind_since_s: float | None = None  # when too much work began to wait

    def start(self) -> None:
        """Start one worker."""
        self.workers.append(self._new_worker())

    def add(self, call_ids: Iterable[int]) -> None:
        """Queue calls. The next `assign` gives them to workers."""
        self._waiting.extend(call_ids)

    def cancel(self, call_id: int) -> None:
        """Forget a call, and ask its worker to end it if it is async. An answer is ignored."""
        for queue in (self._waiting, self._doubted):
            if call_id in queue:
                queue.remove(call_id)
        if worker := self.worker_of(call_id):
            worker.calls[call_id] = False
            if self._limits.concurrency:
                worker.send(Cancel(call_id))

    def worker_of(self, call_id: int) -> HookWorker | None:
        """Return the worker that has this call."""
        return next((worker for worker in self.workers if call_id in worker.calls), None)

    def read(self, now_s: float) -> Iterator[tuple[HookWorker, ToRank]]:
        """Yield what workers have sent, and end those that are late.

        Raises: ConfigError when a hook cannot be imported; SpmdError when a process cannot start.
        """
        for worker in self.workers.copy():
            ending = worker.ending()  # what it sent before is in the socket now
            for message in worker.receive():
                if isinstance(message, Ready) and message.error:
                    raise ConfigError(message.error)
                if isinstance(message, Answers):
                    stands = [one for one in message.answers if self._settle(worker, one)]
                    yield worker, Answers(stands)
                else:
                    worker.is_ready |= isinstance(message, Ready)
                    yield worker, message
            ending = ending or self._fault(worker, now_s)
            if ending or (worker.is_retired and not worker.calls):
                yield worker, Answers(self._end(worker, ending))

    def assign(self, now_s: float) -> Iterator[tuple[HookWorker, list[int]]]:
        """Yield which calls a worker is to be sent, and start another if they wait for long."""
        if not self._waiting and not self._doubted:
            self._behind_since_s = None
            return
        usable = [worker for worker in self.workers if not worker.is_retired]
        if not usable:
            self.start()
        ready = [worker for worker in usable if worker.is_ready]
        for worker in ready:
            if self._doubted and not worker.calls:
                worker.is_alone = True
                yield self._given(worker, [self._doubted.popleft()])
        if self._doubted:  # the workers are emptied for them
            if all(worker.calls for worker in ready) and self._may_start():
                self.start()
            return
        free = [worker for worker in ready if not worker.is_alone]
        free.sort(key=lambda worker: len(worker.calls))
        for number, worker in enumerate(free):
            share = -(-len(self._waiting) // (len(free) - number))
            room = min(share, self._ahead() - len(worker.calls))
            if room > 0:
                yield self._given(worker, [self._waiting.popleft() for _ in range(room)])
        if not self._waiting or not self._may_start():
            self._behind_since_s = None
        elif self._behind_since_s is None:
            self._behind_since_s = now_s
        elif now_s - self._behind_since_s > AHEAD_S:
            self.start()

    def close(self) -> None:
        """End all workers. Blocks: until the system has ended their processes."""
        while self.workers:
            self.workers.pop().close()

    def _settle(self, worker: HookWorker, answer: Answer) -> bool:
        """Take an answer; return whether it stands, and somebody waits for it."""
        is_wanted = worker.calls.pop(answer.call_id, False)
        worker.is_retired |= answer.retires
        is_doubted = isinstance(answer, Problem) and answer.in_doubt
        if is_wanted and is_doubted and not (worker.is_alone and worker.is_fresh):
            self._doubted.append(answer.call_id)
            is_wanted = False
        if not worker.is_fresh:  # a first call may import something, or fill a cache
            newest_s = answer.seconds if self._mean_s else answer.seconds / _NEWEST
            self._mean_s += (newest_s - self._mean_s) * _NEWEST
        worker.is_alone = worker.is_fresh = False
        return is_wanted

    def _fault(self, worker: HookWorker, now_s: float) -> str:
        """Return why a worker that runs is to be ended, "" if it is not."""
        if worker.is_garbled:
            return "wrote into the socket of its process"
        if not worker.is_ready and now_s - worker.started_s > START_DEADLINE_S:
            late = f"hooks were not imported within {START_DEADLINE_S:g} s"
            raise SpmdError(f"{late}\n{worker.tail}".strip())  # the tail names what is imported
        deadline_s, (call_id, since_s) = self._limits.deadline_s, worker.running()
        is_late = deadline_s and call_id != NO_CALL and now_s - since_s > deadline_s
        return self._late if is_late else ""

    def _end(self, worker: HookWorker, ending: str) -> list[Answer]:
        """End a worker, fail the call that its end is charged to, and queue its others again."""
        self.workers.remove(worker)
        worker.close()
        if not worker.is_ready:
            told = f"a process of hooks {ending} while it imported them"
            raise SpmdError(f"{told}\n{worker.tail}".strip())
        charged = None if worker.is_garbled else worker.running()[0]
        if worker.is_alone and worker.is_fresh:
            charged = next(iter(worker.calls), charged)
        wanted = [call_id for call_id, is_wanted in worker.calls.items() if is_wanted]
        if charged not in worker.calls and not worker.is_retired:
            # one that was alone already is settled by the next worker, which is fresh
            extend = self._doubted.extendleft if worker.is_alone else self._doubted.extend
            extend(wanted)
            return []
        self._waiting.extendleft(one for one in reversed(wanted) if one != charged)
        if charged in wanted:
            kind = self._limits.late_kind if ending == self._late else None
            return [Problem(charged, 0.0, ending, unanswered=True, kind=kind)]
        return []

    def _given(self, worker: HookWorker, call_ids: list[int]) -> tuple[HookWorker, list[int]]:
        worker.calls |= dict.fromkeys(call_ids, True)
        return worker, call_ids

    def _ahead(self) -> int:
        """Return how many calls a worker may have at once."""
        if self._limits.concurrency:
            return self._limits.concurrency
        return min(MAX_AHEAD, max(1, int(AHEAD_S / self._mean_s))) if self._mean_s else 1

    def _may_start(self) -> bool:
        """Return whether one more worker is allowed, and none is just starting."""
        workers = [worker for worker in self.workers if not worker.is_retired]
        return len(workers) < self._limits.workers and all(one.is_ready for one in workers)
