"""Engine thread: it steps an engine while requests of an event loop are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from spmd_rl.errors import SpmdError
from spmd_rl.rollout.engine import Engine, Request, StepOutput
from spmd_rl.types.samples import Sample

T = TypeVar("T")
OnTokens = Callable[[list[int]], None]
RequestKey = tuple[int, int]  # uid and index
NUM_CACHED = "num_cached"  # of a sample's metadata: tokens of its prompt that were not computed
ENDED = "the engine has failed, and draws nothing more"
CLOSED = "the server ends, and draws nothing more"


class _Submit(NamedTuple):
    ticket: int
    request: Request
    streams: bool


class _Abort(NamedTuple):
    ticket: int
    key: RequestKey


class _Call(NamedTuple):
    """A function of the engine that runs between two steps."""

    function: Callable[[], Any]
    value: asyncio.Future[Any]


class _News(NamedTuple):
    """What one step brought, by ticket."""

    tokens: list[tuple[int, int]]
    samples: list[tuple[int, Sample]]


class _OpenRequest(NamedTuple):
    sample: asyncio.Future[Sample]
    on_tokens: OnTokens | None


class EngineThread:
    """Draws samples for the event loop in which it is made. Its thread alone uses the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[_Submit | _Abort | _Call | None] = SimpleQueue()
        self._tickets = count()
        self._open: dict[int, _OpenRequest] = {}
        self._by_key: dict[RequestKey, int] = {}
        self._at_engine: dict[RequestKey, tuple[int, bool]] = {}  # the thread's own
        self._cached: dict[RequestKey, int] = {}  # the thread's own
        self.failure: asyncio.Future[None] = self._loop.create_future()  # of the engine, if any
        self._is_closed = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """The number of requests that are not answered."""
        return len(self._open)

    async def draw(self, request: Request, on_tokens: OnTokens | None = None) -> Sample:
        """Return the finished sample of a request. `on_tokens` gets its tokens step by step.

        Its metadata have `NUM_CACHED`.

        Blocks: until it is drawn, and before that until a request with the same uid and index is.
        When the waiting task is cancelled, the engine stops before its next step.
        Raises: DataError where the request can never fit; what has ended the engine.
        """
        key = request.uid, request.index
        while (other := self._by_key.get(key)) is not None:
            await asyncio.wait([self._open[other].sample])
        if self._is_closed or self.failure.done():
            raise SpmdError(CLOSED if self._is_closed else ENDED)
        ticket = next(self._tickets)
        opened = _OpenRequest(self._loop.create_future(), on_tokens)
        self._open[ticket], self._by_key[key] = opened, ticket
        self._commands.put(_Submit(ticket, request, on_tokens is not None))
        try:
            return await opened.sample
        except asyncio.CancelledError:
            self._commands.put(_Abort(ticket, key))
            raise
        finally:
            del self._open[ticket], self._by_key[key]

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that uses the engine's model.

        Blocks: until the thread has run it between two steps.
        Raises: SpmdError of the function; what has ended the engine.
        """
        if self._is_closed or self.failure.done():
            raise SpmdError(CLOSED if self._is_closed else ENDED)
        value: asyncio.Future[T] = self._loop.create_future()
        self._commands.put(_Call(function, value))
        waited: list[asyncio.Future[Any]] = [value, self.failure]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not value.done():
            raise SpmdError(ENDED)
        return value.result()

    async def close(self) -> None:
        """End the thread, and refuse what is open. Blocks: until the step that runs has ended."""
        self._is_closed = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Call):
                _answer(command.value, None, SpmdError(CLOSED))
        for ticket in list(self._open):
            self._refuse(ticket, SpmdError(CLOSED))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._loop.call_soon_threadsafe(self._tell, self._news(self._engine.step()))
        # whatever ends the engine is the answer to all that wait for it
        except BaseException as error:  # noqa: BLE001
            self._loop.call_soon_threadsafe(self._fail, error)

    def _take_commands(self) -> bool:
        """Act on what was asked, and wait for that where there is no work; False at the end."""
        while not self._engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            if isinstance(command, _Submit):
                self._submit(command)
            elif isinstance(command, _Call):
                self._call(command)
            elif self._at_engine.get(command.key, (None,))[0] == command.ticket:
                del self._at_engine[command.key]
                self._cached.pop(command.key, None)
                self._engine.abort(*command.key)
        return True

    def _submit(self, command: _Submit) -> None:
        request = command.request
        try:
            self._engine.submit(request)
        except SpmdError as error:
            self._loop.call_soon_threadsafe(self._refuse, command.ticket, error)
            return
        self._at_engine[request.uid, request.index] = command.ticket, command.streams

    def _call(self, command: _Call) -> None:
        try:
            value, error = command.function(), None
        except SpmdError as problem:
            value, error = None, problem
        self._loop.call_soon_threadsafe(_answer, command.value, value, error)

    def _news(self, output: StepOutput) -> _News:
        self._note_cached(output)
        keys = zip(output.uids.tolist(), output.indices.tolist(), strict=True)
        tokens = []
        for key, token in zip(keys, output.tokens.tolist(), strict=True):
            ticket, streams = self._at_engine[key]
            if streams:
                tokens.append((ticket, token))
        samples = [
            (self._at_engine.pop((one.prompt_uid, one.index))[0], one) for one in output.finished
        ]
        return _News(tokens, samples)

    def _note_cached(self, output: StepOutput) -> None:
        for key, num_cached in zip(output.started, output.cached, strict=True):
            self._cached.setdefault(key, num_cached)
        for one in output.finished:
            key = one.prompt_uid, one.index
            one.metadata[NUM_CACHED] = self._cached.pop(key, 0)

    def _tell(self, news: _News) -> None:
        for ticket, token in news.tokens:
            opened = self._open.get(ticket)
            if opened is not None and opened.on_tokens is not None:
                opened.on_tokens([token])
        for ticket, sample in news.samples:
            if opened := self._waiting(ticket):
                opened.sample.set_result(sample)

    def _refuse(self, ticket: int, error: SpmdError) -> None:
        if opened := self._waiting(ticket):
            opened.sample.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        problem = SpmdError(f"the engine has failed: {error}")
        for ticket in list(self._open):
            self._refuse(ticket, problem)
        if not self.failure.done():
            self.failure.set_exception(error)

    def _waiting(self, ticket: int) -> _OpenRequest | None:
        """Return the request of a ticket, if somebody still waits for it."""
        opened = self._open.get(ticket)
        return None if opened is None or opened.sample.done() else opened


def _answer(future: asyncio.Future[Any], value: Any, error: SpmdError | None) -> None:
    """Give a value or an error to who waits for it, if somebody still does."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
