"""Crew: the processes of one kind of hooks, what each is sent, and who is to blame when one ends.

A process is behind the protocol `Member`, and `Hands` carries out what the crew decides. A call is
answered once. It is made again only after its process ended or was damaged through another's
fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.wire.answer_ring import Rewards
from spmd_rl.hooks.wire.messages import (
    Answer,
    Answered,
    Ask,
    NotReady,
    Problem,
    Question,
    Ready,
    ToProcess,
    ToRank,
)
from spmd_rl.hooks.wire.running_note import Running

AHEAD_S = 0.05  # of work that a process is sent at once; another is started if more waits for that
MAX_AHEAD = 64  # calls, which wait even if the one before them turns out to be slow
START_DEADLINE_S = 600.0  # for a process to import the hooks
_NEWEST = 0.1  # weight of the newest call in the mean time of calls

HELD_S = 0.05  # a call that runs for longer does not hold back the answers before it

FromCall = Rewards | Answer | Ask | Question


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

    @property
    def num_answers(self) -> int: ...

    def take_answers(self, until: int | None = None) -> Rewards: ...

    def running(self) -> Running | None: ...

    def exit_sentence(self) -> str | None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Place:
    """One process, and the calls that it was sent and has not answered, in order."""

    member: Member
    started_s: float
    ready: bool = False
    calls: dict[int, bool] = field(default_factory=dict)  # false: nobody wants the answer any more
    looked_s: float = 0.0  # when its ring was last looked into, since it said nothing
    is_fresh: bool = True  # it has answered no call yet
    is_alone: bool = False  # with a call that may have ended a process
    is_spoiled: bool = False  # it gets no more calls, and ends after those that it has

    @property
    def is_proof(self) -> bool:
        """Whether what goes wrong here can be the fault of nothing but its one call."""
        return self.is_alone and self.is_fresh


@dataclass(frozen=True)
class Hands:
    """What a crew has done by its owner."""

    start: Callable[[], Member]
    introduce: Callable[[Place, Ready], None]  # a process that has just become ready
    send: Callable[[Place, list[int]], None]
    cancel: Callable[[Place, int], None]


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
        self._suspects: deque[int] = deque()  # each is made alone in a process
        self._mean_s = 0.0  # of a call; 0: not known
        self._behind_since_s: float | None = None  # when too much work began to wait

    def start(self, now_s: float) -> None:
        """Start one process."""
        self.places.append(Place(self._hands.start(), now_s))

    def add(self, call_ids: Iterable[int]) -> None:
        """Queue calls. They are sent by the next `dispatch`."""
        self._waiting.extend(call_ids)

    def drop(self, call_id: int) -> None:
        """Forget a call. What its process still sends of it is ignored."""
        if place := self.place_of(call_id):
            place.calls[call_id] = False
            self._hands.cancel(place, call_id)
        for queue in (self._waiting, self._suspects):
            if call_id in queue:
                queue.remove(call_id)

    def place_of(self, call_id: int) -> Place | None:
        """Return the process that has this call."""
        return next((place for place in self.places if call_id in place.calls), None)

    def read(self, now_s: float, news: Collection[Member]) -> list[FromCall]:
        """Return what calls have sent, and end those processes that are late.

        Raises: ConfigError when a hook cannot be imported; SpmdError when a process cannot start.
        """
        found: list[FromCall] = []
        for place in self.places.copy():
            if place.member in news or place.member.has_unread_output:
                sentence = place.member.exit_sentence()
                found += self._received(place)
                if place.member.garbled:
                    found += self._end_garbled(place)
                    continue
                if sentence:
                    found += self._taken(place)
                    found += self._end(place, sentence, self._known_runner(place))
                    continue
            found += self._end_if_late(place, now_s)
            if place.is_spoiled and not place.calls and place in self.places:
                self._close(place)
        return found

    def dispatch(self, now_s: float) -> None:
        """Send waiting calls to processes that have room, and start another if they wait long."""
        if not self._waiting and not self._suspects:
            self._behind_since_s = None
            return
        usable = [place for place in self.places if not place.is_spoiled]
        if not usable:
            self.start(now_s)
        usable = [place for place in usable if place.ready]
        for place in usable:
            if self._suspects and not place.calls:
                place.is_alone = True
                self._send(place, [self._suspects.popleft()])
        if self._suspects:  # the processes are emptied for them
            if all(place.calls for place in usable) and self._may_start():
                self.start(now_s)
            return
        usable = sorted((place for place in usable if not place.is_alone), key=_load)
        for number, place in enumerate(usable):
            share = -(-len(self._waiting) // (len(usable) - number))
            room = min(share, self._ahead() - len(place.calls))
            if room > 0:
                self._send(place, [self._waiting.popleft() for _ in range(room)])
        if not self._is_behind(now_s):
            self._behind_since_s = None
        elif self._behind_since_s is None:
            self._behind_since_s = now_s
        elif now_s - self._behind_since_s > AHEAD_S:
            self.start(now_s)

    def close(self) -> None:
        """End all processes."""
        while self.places:
            self._close(self.places[0])

    def _close(self, place: Place) -> None:
        place.member.close()
        self.places.remove(place)

    def _received(self, place: Place) -> list[FromCall]:
        """Take what a process has sent, and return what somebody is to hear of."""
        found: list[FromCall] = []
        for message in place.member.receive():
            if isinstance(message, Answered):
                found += self._taken(place, message.count)
            elif isinstance(message, Ready):
                place.ready = True
                self._hands.introduce(place, message)
            elif isinstance(message, NotReady):
                raise ConfigError(message.error)
            elif message.call_id in place.calls and (
                isinstance(message, Ask | Question) or self._settle(place, message)
            ):
                found.append(message)
        return found

    def _taken(self, place: Place, until: int | None = None) -> list[FromCall]:
        """Take answers of a process's ring. Calls that nobody waits for may be among them."""
        rewards = place.member.take_answers(until)
        for call_id, seconds in zip(rewards.call_ids, rewards.seconds, strict=True):
            place.calls.pop(call_id, None)
            self._note_seconds(place, seconds)
        return [rewards] if rewards.call_ids else []

    def _settle(self, place: Place, answer: Answer) -> bool:
        """Take an answer; return whether it stands, or the call is to be made again, alone."""
        is_wanted, stands = place.calls.pop(answer.call_id), True
        place.is_spoiled |= answer.spoiled
        if isinstance(answer, Problem):
            stands = not answer.in_doubt or place.is_proof
            if is_wanted and not stands:
                self._suspects.append(answer.call_id)
        self._note_seconds(place, answer.seconds)
        return stands

    def _note_seconds(self, place: Place, seconds: float) -> None:
        """Note how long a call took that a process has answered."""
        if not place.is_fresh:  # a first call may import something, or fill a cache
            newest = seconds if self._mean_s else seconds / _NEWEST
            self._mean_s += (newest - self._mean_s) * _NEWEST
        place.is_alone = place.is_fresh = False

    def _end_if_late(self, place: Place, now_s: float) -> list[FromCall]:
        """End a process that has not started in time, or whose hook has run for too long."""
        if not place.ready and now_s - place.started_s > START_DEADLINE_S:
            tail = place.member.tail  # it names what is imported
            late = f"hooks were not imported within {START_DEADLINE_S:g} s"
            raise SpmdError(f"{late}\n{tail}".strip())
        running = place.member.running()
        if running is None or now_s - max(running.since_s, place.looked_s) < HELD_S:
            return []
        place.looked_s = now_s
        # it may have answered just now; what it wrote before an answer is then in the socket
        num_answers = place.member.num_answers
        found = self._received(place)
        if place.member.garbled:
            return found + self._end_garbled(place)
        found += self._taken(place, num_answers)
        if (runner := self._late_runner(place, now_s)) is not None:
            sentence = self._limits.late.format(self._limits.deadline_s)
            found += self._end(place, sentence, runner)
        return found

    def _end_garbled(self, place: Place) -> list[FromCall]:
        """End a process in whose socket a hook wrote: any call whose answer it did not tell of."""
        is_known = len(place.calls) == 1 and not self._limits.slots
        runner = next(iter(place.calls)) if is_known else None
        return self._end(place, "wrote into the socket of its process", runner)

    def _late_runner(self, place: Place, now_s: float) -> int | None:
        deadline_s, running = self._limits.deadline_s, place.member.running()
        is_late = deadline_s and running and now_s - running.since_s > deadline_s
        return running.call_id if running and is_late else None

    def _known_runner(self, place: Place) -> int | None:
        """Return the call that a process was running when it ended, if that is certain."""
        running = place.member.running()
        if running is None or running.beside_threads:
            return None
        return running.call_id

    def _end(self, place: Place, sentence: str, blamed: int | None) -> list[FromCall]:
        """End a process, fail the call that is to blame, and queue its others again.

        If nobody is known to be, each call is suspected, and made alone in a process.
        """
        self._close(place)
        if not place.ready:
            tail = place.member.tail
            raise SpmdError(f"a process of hooks {sentence} while it imported them\n{tail}".strip())
        if place.is_proof:
            blamed = next(iter(place.calls), blamed)
        wanted = [call_id for call_id, is_wanted in place.calls.items() if is_wanted]
        failed: list[FromCall] = []
        if blamed in wanted:
            wanted.remove(blamed)
            failed.append(Problem(blamed, 0.0, sentence, unanswered=True))
        if blamed is None and not place.is_spoiled:
            self._suspects.extend(wanted)
        else:
            self._waiting.extendleft(reversed(wanted))
        return failed

    def _send(self, place: Place, call_ids: list[int]) -> None:
        place.calls |= dict.fromkeys(call_ids, True)
        self._hands.send(place, call_ids)

    def _ahead(self) -> int:
        """How many calls a process may have at once."""
        if self._limits.slots:
            return self._limits.slots
        return min(MAX_AHEAD, max(1, int(AHEAD_S / self._mean_s))) if self._mean_s else 1

    def _is_behind(self, now_s: float) -> bool:
        """Whether what waits is more than `AHEAD_S` of work, and one more process is allowed."""
        if not self._waiting or not self._may_start():
            return False
        ages = [now_s - run.since_s for place in self.places if (run := place.member.running())]
        call_s = max([self._mean_s, *ages])
        return call_s * len(self._waiting) / (self._limits.slots or 1) > AHEAD_S

    def _may_start(self) -> bool:
        """Return whether one more process is allowed, and none is just starting."""
        places = [place for place in self.places if not place.is_spoiled]
        return len(places) < self._limits.processes and all(place.ready for place in places)


def _load(place: Place) -> int:
    return len(place.calls)
