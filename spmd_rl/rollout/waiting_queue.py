"""Waiting queue: requests that wait for a row, by priority and then by their arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from spmd_rl.rollout.engine import Request


class WaitingQueue:
    """Requests in the order in which they are admitted: those of a lower priority number first.

    Equal ones keep their order. What is put back at the left is the first of its own priority.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[Request]] = {}  # none is empty
        self._priorities: list[int] = []  # a heap of their keys
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._queues):
            yield from self._queues[priority]

    @property
    def first(self) -> Request:
        """The request that is admitted next. Raises: ValueError where none waits."""
        return self._queues[self._lowest][0]

    def append(self, request: Request) -> None:
        self._of(request).append(request)
        self._length += 1

    def appendleft(self, request: Request) -> None:
        self._of(request).appendleft(request)
        self._length += 1

    def extendleft(self, requests: Iterable[Request]) -> None:
        """Put requests at the left, one after the other."""
        for request in requests:
            self.appendleft(request)

    def popleft(self) -> Request:
        """Remove the request that is admitted next. Raises: ValueError where none waits."""
        queue = self._queues[self._lowest]
        request = queue.popleft()
        if not queue:
            del self._queues[heappop(self._priorities)]
        self._length -= 1
        return request

    def replace(self, requests: Iterable[Request]) -> None:
        """Hold these requests alone."""
        self._queues, self._priorities, self._length = {}, [], 0
        for request in requests:
            self.append(request)

    def _of(self, request: Request) -> deque[Request]:
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = deque()
            heappush(self._priorities, request.priority)
        return queue

    @property
    def _lowest(self) -> int:
        if not self._priorities:
            raise ValueError("no request waits")
        return self._priorities[0]
