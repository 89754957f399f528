"""Crew: the processes of one kind of hooks, what each is sent, and who is to blame when one ends.

A process is behind the protocol `Member`, and `Hands` carries out what it decides. A
call is answered once; it is sent again only after its process ended through another's fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.messages import NotReady, Problem, Ready, Result, ToProcess, ToRank
from spmd_rl.hooks.running_note import Running

AHEAD_S = 0.05  # work that a process is sent before it answers; more than that asks for another
MAX_AHEAD = 512  # calls
START_DEADLINE_S = 600.0  # for a process to import the hooks
OUTPUT_S = 1.0  # until more output may be read
_NEWEST = 0.1  # weight of the newest call in the mean time of calls


class Member(Protocol):
    """A process, as its crew sees it."""

    @property
    def garbled(self) -> bool: ...

    @property
    def tail(self) -> str: ...

    @property
    def has_unread_output(self) -> bool: ...

    def send(self, message: ToProcess) -> None: ...

    def receive(self) -> list[ToRank]: ...

    def running(self) -> Running | None: ...

    def exit_sentence(self) -> str | None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Place:
    """One process, and the calls that it was sent and has not answered, in order."""

    member: Member
    started_s: float
    ready: bool = False
    calls: dict[int, None] = field(default_factory=dict)
    is_fresh: bool = True  # it has answered no call yet
    is_alone: bool = False  # with a call that may have ended the process before
    is_ending: bool = False  # by itself, through nobody's fault


@dataclass(frozen=True)
class Hands:
    """What a crew has done by its owner."""

    start: Callable[[], Member]
    introduce: Callable[[Place, Ready], None]  # a process that has just become ready
    send: Callable[[Place, list[int]], None]


@dataclass(frozen=True)
class Limits:
    """Bounds of a crew. `slots` is the calls at once in a process; 0 sends plain calls ahead."""

    processes: int
    slots: int
    deadline_s: float  # of one uninterrupted run of a hook; 0: none
    late: str = "took longer than {:g} s"  # what is said of a call that missed the deadline


class Crew:
    """The processes of one kind, and the calls that wait for them. Times are in seconds of one
    monotonic clock.
    """

    def __init__(self, limits: Limits, hands: Hands) -> None:
        self.places: list[Place] = []
        self._limits, self._hands = limits, hands
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()  # each is sent to a process of its own
        self._mean_s = 0.0  # of a call; 0: not known

    def start(self, now_s: float) -> None:
        """Start one process."""
        self.places.append(Place(self._hands.start(), now_s))

    def add(self, call_id: int) -> None:
        """Queue a call. It is sent by the next `dispatch`."""
        self._waiting.append(call_id)

    def drop(self, call_id: int) -> bool:
        """Forget a call that was not sent; return whether there was one."""
        for queue in (self._waiting, self._suspects):
            if call_id in queue:
                queue.remove(call_id)
                return True
        return False

    def read(self, now_s: float, news: Collection[Member]) -> list[Result | Problem]:
        """Read those processes that have news, and end those that are late.

        Raises: ConfigError when a hook cannot be imported; SpmdError when a process cannot start.
        """
        answers: list[Result | Problem] = []
        for place in self.places.copy():
            if place.member in news:
                exit_sentence = place.member.exit_sentence()
                answers += self._read(place)
                if exit_sentence:
                    answers += self._end(place, exit_sentence)
                    continue
                if place.member.garbled:
                    answers += self._end(place, "wrote into the socket of its process")
                    continue
            answers += self._end_if_late(place, now_s)
        return answers

    def dispatch(self, now_s: float) -> None:
        """Send waiting calls to processes that have room, and start another if they wait long."""
        if not self._waiting and not self._suspects:
            return
        if not self.places:
            self.start(now_s)
        usable = [place for place in self.places if place.ready and not place.is_ending]
        for place in usable:
            if self._suspects and not place.calls:
                place.is_alone = True
                self._send(place, [self._suspects.popleft()])
        if self._suspects:  # the processes are emptied for them
            return
        usable = sorted((place for place in usable if not place.is_alone), key=_load)
        for number, place in enumerate(usable):
            share = -(-len(self._waiting) // (len(usable) - number))
            room = min(share, self._ahead() - len(place.calls))
            if room > 0:
                self._send(place, [self._waiting.popleft() for _ in range(room)])
        if self._waiting and self._wants_another(now_s):
            self.start(now_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until `read` must be called although there is no news; None: never."""
        waits = [wait for place in self.places for wait in self._waits(place, now_s)]
        if self._waiting and len(self.places) < self._limits.processes:
            waits.append(AHEAD_S)
        return max(0.0, min(waits)) if waits else None

    def close(self) -> None:
        """End all processes."""
        while self.places:
            self.places.pop().member.close()

    def _read(self, place: Place) -> Iterator[Result | Problem]:
        for message in place.member.receive():
            if isinstance(message, Ready):
                place.ready = True
                self._hands.introduce(place, message)
            elif isinstance(message, NotReady):
                raise ConfigError(message.error)
            elif message.call_id in place.calls:
                yield from self._answer(place, message)

    def _answer(self, place: Place, message: Result | Problem) -> Iterator[Result | Problem]:
        del place.calls[message.call_id]
        in_doubt = isinstance(message, Problem) and message.in_doubt
        if in_doubt and not (place.is_fresh or place.is_alone):
            self._suspects.append(message.call_id)
        else:
            yield message
        place.is_ending |= in_doubt
        place.is_fresh = place.is_alone = False
        newest = message.seconds if self._mean_s else message.seconds / _NEWEST
        self._mean_s += (newest - self._mean_s) * _NEWEST

    def _end_if_late(self, place: Place, now_s: float) -> Iterator[Result | Problem]:
        """End a process that has not started in time, or whose hook has run for too long."""
        if not place.ready and now_s - place.started_s > START_DEADLINE_S:
            raise SpmdError(f"hooks were not imported within {START_DEADLINE_S:g} s")
        deadline_s, running = self._limits.deadline_s, place.member.running()
        if not deadline_s or running is None or running.call_id not in place.calls:
            return
        if now_s - running.since_s > deadline_s:
            yield from self._end(place, self._limits.late.format(deadline_s))

    def _end(self, place: Place, sentence: str) -> Iterator[Result | Problem]:
        """End a process, blame the call that it was running, and queue its others again."""
        place.member.close()
        self.places.remove(place)
        if not place.ready:
            raise SpmdError(
                f"a process of hooks {sentence} while it imported them\n{place.member.tail}"
            )
        running = place.member.running()
        blamed = running.call_id if running else None
        if place.is_alone:
            blamed = next(iter(place.calls), None)
        others = [call_id for call_id in place.calls if call_id != blamed]
        if blamed in place.calls:
            yield Problem(blamed, 0.0, sentence)
        elif not place.is_ending:
            self._suspects.extend(others)
            return
        self._waiting.extendleft(reversed(others))

    def _send(self, place: Place, call_ids: list[int]) -> None:
        place.calls |= dict.fromkeys(call_ids)
        self._hands.send(place, call_ids)

    def _ahead(self) -> int:
        """How many calls a process may have at once."""
        if self._limits.slots:
            return self._limits.slots
        return min(MAX_AHEAD, max(1, int(AHEAD_S / self._mean_s))) if self._mean_s else 1

    def _wants_another(self, now_s: float) -> bool:
        """Whether what waits is more than `AHEAD_S` of work for processes that are all busy."""
        if len(self.places) >= self._limits.processes or not all(p.ready for p in self.places):
            return False
        ages = [now_s - run.since_s for place in self.places if (run := place.member.running())]
        call_s = max([self._mean_s, *ages])
        return call_s * len(self._waiting) / (self._limits.slots or 1) > AHEAD_S

    def _waits(self, place: Place, now_s: float) -> Iterator[float]:
        if not place.ready:
            yield place.started_s + START_DEADLINE_S - now_s
        elif place.calls and self._limits.deadline_s:
            running = place.member.running()
            yield (running.since_s if running else now_s) + self._limits.deadline_s - now_s
        if place.member.has_unread_output:
            yield OUTPUT_S


def _load(place: Place) -> int:
    return len(place.calls)
