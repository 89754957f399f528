"""Times of requests: how long each waited, was computed, drawn and graded, and lanes of a trace.

A request asks for the samples of a prompt. It passes these events:

    asked        the program of its first episode has asked for a turn; only with episodes
    started      the engine has begun to compute its prompt
    first_token  the first token of its first sample is drawn
    answered     the last turn of its episodes is drawn; only with episodes
    drawn        the last token of its last sample is drawn; with a hook `generate`, all episodes
                 are over
    graded       its rewards are known

A stage is what lies between two events: agent, queue, prefill, decode, agent again, and grading. Of
an event that nobody tells, as of engines that keep their queue to themselves, the stage is part of
the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.trace import Trace, now_ns

Event = Literal["asked", "started", "first_token", "answered", "drawn", "graded"]
Key = tuple[int, int]  # uid of the prompt, and index of the first sample that is drawn

# key of the metadata of a request's first sample: seconds from the submission to each event
TIMES = "times"
STAGE_BEFORE: dict[str, str] = {
    "asked": "agent",
    "started": "queue",
    "first_token": "prefill",
    "answered": "decode",
    "drawn": "decode",
    "graded": "grading",
}
ORDER = {event: number for number, event in enumerate(STAGE_BEFORE)}
NUM_LANES = 4  # of a process; so many requests at once are in its trace


@dataclass
class _TimedRequest:
    """A request on its way. `lane` is the number of its lane; None if there was none free."""

    submitted_ns: int
    event_ns: dict[str, int] = field(default_factory=dict)
    lane: int | None = None

    @property
    def last_event(self) -> str:
        """The event that was told last; "" before the first."""
        return next(reversed(self.event_ns), "")


class RequestTimes:
    """Takes the times of the requests of one process, if its trace is on.

    A request takes a free lane at its first event. As lanes are few, the trace holds some of the
    requests, whatever their length.
    """

    def __init__(self, trace: Trace, num_lanes: int = NUM_LANES) -> None:
        self._trace = trace
        self._requests: dict[Key, _TimedRequest] = {}
        self._undrawn: set[Key] = set()  # requests that have started, and have no token
        # when the first turn of a prompt's episodes was asked for, and when their last was drawn
        self._turns_ns: dict[int, tuple[int, int]] = {}
        self._free_lanes = list(range(num_lanes))
        self._free_since_ns = [0] * num_lanes

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, key: Key) -> None:
        """Note that a request was submitted now."""
        if self._trace.on:
            self._requests[key] = _TimedRequest(now_ns())

    def mark(self, event: Event, key: Key, at_ns: int | None = None) -> None:
        """Note that an event of this request is now, or was at a reading of `now_ns`.

        One that is told again, or after a later event, is ignored.
        """
        request = self._requests.get(key)
        if request is not None and ORDER[event] > ORDER.get(request.last_event, -1):
            before_ns = request.event_ns.get(request.last_event, request.submitted_ns)
            request.event_ns[event] = max(before_ns, now_ns() if at_ns is None else at_ns)
            if len(request.event_ns) == 1 and self._free_lanes:
                request.lane = heapq.heappop(self._free_lanes)

    def mark_asked(self, key: Key) -> None:
        """Note that an episode asks for a turn now, under this key of the engine."""
        self.mark("asked", key)
        if self._trace.on:
            self._turns_ns.setdefault(key[0], (now := now_ns(), now))

    def mark_turn(self, uid: int) -> None:
        """Note that a turn of an episode of this prompt is drawn now."""
        if turns := self._turns_ns.get(uid):
            self._turns_ns[uid] = turns[0], now_ns()

    def mark_over(self, key: Key) -> None:
        """Note that all episodes of a request are over now, which may have asked for no turn."""
        asked_ns, answered_ns = self._turns_ns.get(key[0], (None, None))
        self.mark("asked", key, asked_ns)
        if answered_ns is not None:
            self.mark("answered", key, answered_ns)
        self.mark("drawn", key)

    def mark_step(
        self,
        began_ns: int,
        started: Iterable[Key],
        uids: NDArray[np.int64],
        indices: NDArray[np.int64],
    ) -> None:
        """Note what a step of the engine, which began then, has started, and drawn tokens of."""
        for key in started:
            if key in self._requests:
                self.mark("started", key, began_ns)
                self._undrawn.add(key)
        if not self._undrawn:
            return
        first = self._undrawn.intersection(zip(uids.tolist(), indices.tolist(), strict=True))
        self._undrawn -= first
        for key in first:
            self.mark("first_token", key)

    def finish(self, key: Key) -> dict[str, float]:
        """Forget a request, put it into the trace, and return its times for `Sample.metadata`."""
        request = self._requests.get(key)
        if request is None:
            return {}
        if request.lane is not None:
            self._draw(key, request, request.lane)
        self.forget(key)
        return {
            event: (at - request.submitted_ns) / 1e9
            for event in STAGE_BEFORE
            if (at := request.event_ns.get(event)) is not None
        }

    def forget(self, key: Key) -> None:
        """Forget a request that has ended before its end, or is finished."""
        request = self._requests.pop(key, None)
        self._undrawn.discard(key)
        self._turns_ns.pop(key[0], None)
        if request is not None and request.lane is not None:
            self._free_since_ns[request.lane] = now_ns()
            heapq.heappush(self._free_lanes, request.lane)

    def _draw(self, key: Key, request: _TimedRequest, lane: int) -> None:
        """Put the stages of a request on its lane, where the last request has left it."""
        began = max(request.submitted_ns, self._free_since_ns[lane])
        for event in STAGE_BEFORE:
            if (ended := request.event_ns.get(event)) is not None:
                stage = _stage_before(event, request.event_ns)
                name = f"request {lane + 1}"
                self._trace.add(stage, began, ended, lane=name, prompt=key[0], first_sample=key[1])
                began = ended


def stages_of(times: Mapping[str, float]) -> dict[str, float]:
    """Return how long each known stage of a request took, in seconds."""
    stages: dict[str, float] = {}
    began = 0.0
    for event in STAGE_BEFORE:
        if event in times:
            stage = _stage_before(event, times)
            stages[stage] = stages.get(stage, 0.0) + times[event] - began
            began = times[event]
    return stages


def _stage_before(event: str, events: Mapping[str, Any]) -> str:
    """Return the stage before an event: what follows the last turn is the agent's."""
    return "agent" if event == "drawn" and "answered" in events else STAGE_BEFORE[event]


def request_metrics(metadata: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the stages over the requests that know them, and the longest request."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    longest = 0.0
    for of_sample in metadata:
        if times := of_sample.get(TIMES):
            longest = max(longest, *times.values())
            for stage, seconds in stages_of(times).items():
                sums[stage] = sums.get(stage, 0.0) + seconds
                counts[stage] = counts.get(stage, 0) + 1
    means = {f"time/{stage}_mean": total / counts[stage] for stage, total in sums.items()}
    return means | {"time/request_max": longest} if means else {}
