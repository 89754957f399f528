"""Watched steps: each step of a coroutine is noted as its call's, so that the rank can blame it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from spmd_rl.hooks.child.process_state import ProcessState
from spmd_rl.hooks.child.stopwatch import LoopClock, Stopwatch
from spmd_rl.hooks.wire.messages import DAMAGED_EXIT
from spmd_rl.hooks.wire.running_note import RunningNote
from spmd_rl.rewards.deadline import WATCH


class OpenCall:
    """An async call that is not answered yet: its time, and the tasks that it has started."""

    def __init__(self, call_id: int, function: Any, deadline_s: float, clock: LoopClock) -> None:
        self.call_id, self.function, self.deadline_s = call_id, function, deadline_s
        self.watch = Stopwatch(clock)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.main: asyncio.Task[None]  # the task of the function itself
        self.timer: asyncio.TimerHandle | None = None
        self.end_sentence = ""  # why it was cancelled


_current: contextvars.ContextVar[OpenCall | None] = contextvars.ContextVar("call", default=None)


class StepWatcher:
    """Notes each step in an event loop, and puts the process right after it."""

    def __init__(self, note: RunningNote, state: ProcessState) -> None:
        self.clock = LoopClock()
        self.state, self._note = state, note

    def start(
        self, loop: asyncio.AbstractEventLoop, call: OpenCall, main: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        """Run `main` as a task of this call. What it starts in turn is the call's too."""
        context = contextvars.copy_context()
        context.run(_current.set, call)
        context.run(WATCH.set, call.watch)
        return loop.create_task(main, context=context)

    def new_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """Make a task, as the task factory of an event loop."""
        call = _current.get() if context is None else context.get(_current)
        if call is None:
            return asyncio.Task(coroutine, loop=loop, context=context)
        task = asyncio.Task(_Watched(coroutine, call, self), loop=loop, context=context)
        call.tasks.add(task)
        task.add_done_callback(call.tasks.discard)
        return task

    def begin(self, call: OpenCall) -> float:
        """Note that a step of the call runs, and return when it began."""
        self._note.write(call.call_id)
        return time.monotonic()

    def end(self, call: OpenCall, began_s: float) -> None:
        """Note the end of a step. A process that it damaged or forked ends here."""
        self._restore()
        self._note.clear()
        self.clock.add_step(time.monotonic() - began_s, call.watch)

    def is_worn(self) -> bool:
        """Put the process right before the last step of a call ends, and return whether it is to
        get no other call.
        """
        self._restore()
        return self.state.is_worn

    def _restore(self) -> None:
        try:
            self.state.restore()
        except OSError:
            os._exit(DAMAGED_EXIT)


class NotedThreads(ThreadPoolExecutor):
    """Threads of `asyncio.to_thread`: while one runs, a crash may be its fault, not a step's."""

    def __init__(self, note: RunningNote, num_threads: int) -> None:
        super().__init__(num_threads)
        self._note = note

    def submit(self, function: Any, /, *inputs: Any, **named: Any) -> Future[Any]:
        self._note.add_thread(1)
        future = super().submit(function, *inputs, **named)
        future.add_done_callback(lambda _: self._note.add_thread(-1))
        return future


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are noted."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], call: OpenCall, watcher: StepWatcher
    ) -> None:
        self._coroutine, self._call, self._watcher = coroutine, call, watcher

    def send(self, value: Any) -> Any:
        began_s = self._watcher.begin(self._call)
        try:
            return self._coroutine.send(value)
        finally:
            self._watcher.end(self._call, began_s)

    def throw(self, *error: Any) -> Any:
        began_s = self._watcher.begin(self._call)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._watcher.end(self._call, began_s)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()
