"""Calls of one rank: their endpoints, which may start now, and answers that are deferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.channel.shared_arrays import Outgoing, SharedArrays
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.endpoint import Role, Signature, endpoints

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """One endpoint of a role of this rank; `name` is "role.endpoint".

    Its `method` takes all arguments by position. The controller reads the answer of a rank that
    `shares_arrays`, rather than to compare it with the answers of others.
    """

    name: str
    signature: Signature
    method: Callable[..., Any]
    shares_arrays: bool

    def pack(self, value: Any, shared: SharedArrays | None) -> Packed:
        """Encode what the method returned, with large arrays in `shared`."""
        outgoing = Outgoing(shared) if shared is not None and self.shares_arrays else None
        return self.signature.result.pack(value, outgoing)


def bind(role_name: str, role: Role, endpoint_name: str) -> LocalEndpoint:
    """Return an endpoint of `role`."""
    endpoint, context = endpoints(type(role))[endpoint_name], role.context
    signature = Signature(endpoint)
    is_of_shard = signature.gathers or endpoint.route is not None
    is_not_compared = context.shard_size == 1 or signature.is_deferred
    return LocalEndpoint(
        f"{role_name}.{endpoint_name}",
        signature,
        signature.method(role),
        is_of_shard and is_not_compared and context.shard_rank == 0,
    )


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A call that is unanswered: the role that it is to, its answer to come, and its number.

    `on_answer` is called once, when the answer is there.
    """

    role: str
    number: int
    deferred: Deferred[Any]
    on_answer: Callable[[Deferred[Any]], None]


class RunningCalls(Generic[C]):
    """Commands in the order in which they may start.

    They start in the order of their arrival. While a call is unanswered, only a command that
    `is_concurrent` starts; the first that is not holds back all that come after it.
    """

    def __init__(self, is_concurrent: Callable[[C], bool]) -> None:
        self._is_concurrent = is_concurrent
        self._held: deque[C] = deque()
        self._unanswered: dict[int, DeferredCall] = {}
        self._aborted: set[int] = set()  # numbers of calls that were aborted before they started
        self.holds_answers = False  # until `release`
        # a call may be unanswered on a rank that steps with this one
        self.is_held_by_others = False

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def num_held(self) -> int:
        """The commands that have not started."""
        return len(self._held)

    def add(self, command: C) -> None:
        """Queue a command."""
        self._held.append(command)

    def ready(self) -> Iterator[C]:
        """Yield the commands that may start; each has to be run before the next is asked for."""
        while self._held:
            is_unanswered = self._unanswered or self.is_held_by_others
            if is_unanswered and not self._is_concurrent(self._held[0]):
                return
            yield self._held.popleft()
        self._aborted.clear()  # a call that has neither started nor is held was answered already

    def defer(self, call: DeferredCall) -> None:
        """Keep a call that started, until it is answered."""
        self._unanswered[call.number] = call
        call.deferred.call_when_answered(lambda: self._answer(call))
        if call.number in self._aborted:
            self._aborted.discard(call.number)
            if not call.deferred.is_answered:
                call.deferred.abort()

    def abort(self, number: int) -> None:
        """End a call early: now if it runs, else as soon as it has started.

        A call that was answered already is left alone.
        """
        if (call := self._unanswered.get(number)) is not None:
            if not call.deferred.is_answered:  # its answer may be held
                call.deferred.abort()
        elif self._held:
            self._aborted.add(number)

    def fail(self, role: str, error: BaseException) -> None:
        """Answer every unanswered call of a role with an error."""
        for call in list(self._unanswered.values()):
            if call.role == role and not call.deferred.is_answered:
                call.deferred.fail(error)

    def stop_sharing(self, error: BaseException) -> None:
        """Answer what is unanswered, by an error unless its answer is held."""
        self.holds_answers = self.is_held_by_others = False
        for call in list(self._unanswered.values()):
            if call.deferred.is_answered:
                self.release([call.number])
            else:
                call.deferred.fail(error)

    def release(self, numbers: Iterable[int]) -> None:
        """Answer calls whose answers were held, and which count as unanswered until then."""
        for number in numbers:
            call = self._unanswered.pop(number)
            call.on_answer(call.deferred)

    def _answer(self, call: DeferredCall) -> None:
        if not self.holds_answers:
            self.release([call.number])
