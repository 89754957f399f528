"""Engine thread: it steps an engine while requests of an event loop are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
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


class _OpenRequest(NamedTuple):
    sample: asyncio.Future[Sample]
    on_tokens: OnTokens | None


class EngineThread:
    """Draws samples for the event loop in which it is made. Its thread alone uses the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # for the thread
        self._tickets = count()
        self._open: dict[int, _OpenRequest] = {}
        self._calls: set[asyncio.Future[Any]] = set()  # that have no value yet
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
        self._commands.put(partial(self._submit, ticket, request, on_tokens is not None))
        try:
            return await opened.sample
        except asyncio.CancelledError:
            self._commands.put(partial(self._abort, ticket, key))
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
        self._calls.add(value)
        self._commands.put(partial(self._call, function, value))
        try:
            return await value
        finally:
            self._calls.discard(value)

    async def close(self) -> None:
        """End the thread, and refuse what is open. Blocks: until the step that runs has ended."""
        self._is_closed = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._refuse_all(SpmdError(CLOSED))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._loop.call_soon_threadsafe(self._tell, *self._news(self._engine.step()))
        # whatever ends the engine is the answer to all that wait for it
        except BaseException as error:  # noqa: BLE001
            self._loop.call_soon_threadsafe(self._end, error)

    def _take_commands(self) -> bool:
        """Act on what was asked, and wait for that where there is no work; False at the end."""
        while not self._engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _submit(self, ticket: int, request: Request, streams: bool) -> None:
        try:
            self._engine.submit(request)
        except SpmdError as error:
            self._loop.call_soon_threadsafe(self._refuse, ticket, error)
            return
        self._at_engine[request.uid, request.index] = ticket, streams

    def _abort(self, ticket: int, key: RequestKey) -> None:
        if self._at_engine.get(key, (None,))[0] == ticket:
            del self._at_engine[key]
            self._cached.pop(key, None)
            self._engine.abort(*key)

    def _call(self, function: Callable[[], T], value: asyncio.Future[T]) -> None:
        try:
            result = function()
        except SpmdError as error:
            self._loop.call_soon_threadsafe(_fail, value, error)
            return
        self._loop.call_soon_threadsafe(_give, value, result)

    def _news(self, output: StepOutput) -> tuple[list[tuple[int, int]], list[tuple[int, Sample]]]:
        """Return the tokens to show and the finished samples of a step, each with its ticket."""
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
        return tokens, samples

    def _note_cached(self, output: StepOutput) -> None:
        for key, num_cached in zip(output.started, output.cached, strict=True):
            self._cached.setdefault(key, num_cached)
        for one in output.finished:
            key = one.prompt_uid, one.index
            one.metadata[NUM_CACHED] = self._cached.pop(key, 0)

    def _tell(self, tokens: list[tuple[int, int]], samples: list[tuple[int, Sample]]) -> None:
        for ticket, token in tokens:
            opened = self._open.get(ticket)
            if opened is not None and opened.on_tokens is not None:
                opened.on_tokens([token])
        for ticket, sample in samples:
            if opened := self._open.get(ticket):
                _give(opened.sample, sample)

    def _refuse(self, ticket: int, error: SpmdError) -> None:
        if opened := self._open.get(ticket):
            _fail(opened.sample, error)

    def _refuse_all(self, error: SpmdError) -> None:
        for future in [*(opened.sample for opened in self._open.values()), *self._calls]:
            _fail(future, error)

    def _end(self, error: BaseException) -> None:
        self._refuse_all(SpmdError(f"the engine has failed: {error}"))
        if not self.failure.done():
            self.failure.set_exception(error)


def _give(future: asyncio.Future[T], value: T) -> None:
    """Give a value to who waits for it, if somebody still does."""
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: SpmdError) -> None:
    """Give an error to who waits for it, if somebody still does."""
    if not future.done():
        future.set_exception(error)
