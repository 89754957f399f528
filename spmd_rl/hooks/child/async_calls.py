"""Async calls in an event loop: each step of a coroutine is noted as its call's, so that a crash or
a hang can be charged to it, and the process is put right after the step.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from spmd_rl.hooks.child.calls import EpisodeCall, RewardCall
from spmd_rl.hooks.child.process_state import ProcessState
from spmd_rl.hooks.wire.channel import CallNote
from spmd_rl.rewards.deadline import WATCH

LONG_STEP_S = 0.01  # a step that holds the event loop for longer stops the time of all others


class LoopClock:
    """Time of an event loop: it stands still while a step holds the loop for long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._held_s = clock, 0.0

    def now_s(self) -> float:
        return self._clock() - self._held_s

    def add_step(self, step_s: float, watch: Stopwatch) -> None:
        """Count a step of the call whose time is `watch`."""
        if step_s > LONG_STEP_S:
            self._held_s += step_s
            watch.add(step_s)


class Stopwatch:
    """Time that one call has used. It may be paused several times at once."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock, self._used_s, self._num_pauses = clock, 0.0, 0
        self._running_since_s = clock.now_s()

    @property
    def used_s(self) -> float:
        if self._num_pauses:
            return self._used_s
        return self._used_s + self._clock.now_s() - self._running_since_s

    def add(self, seconds: float) -> None:
        """Count seconds that the clock of the loop leaves out."""
        self._used_s += seconds

    def pause(self) -> None:
        self._used_s = self.used_s
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        self._running_since_s = self._clock.now_s()


class OpenCall:
    """An async call that is not answered yet: its time, and the tasks that it has started."""

    def __init__(self, job: RewardCall | EpisodeCall, deadline_s: float, clock: LoopClock) -> None:
        self.job, self.deadline_s = job, deadline_s
        self.watch = Stopwatch(clock)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.main: asyncio.Task[Any]  # the task of the function itself
        self.timer: asyncio.TimerHandle | None = None
        self.end_sentence = ""  # why it was cancelled


_current: contextvars.ContextVar[OpenCall | None] = contextvars.ContextVar("call", default=None)


class StepWatcher:
    """Notes the steps of all calls in an event loop."""

    def __init__(self, note: CallNote, state: ProcessState) -> None:
        self.clock = LoopClock()
        self._note, self._state = note, state

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

    def run(self, call: OpenCall, step: Callable[..., Any], *inputs: Any) -> Any:
        """Run a step of the call. A process that it damaged or forked ends after it."""
        self._note.write(call.job.call_id)
        began_s = time.monotonic()
        try:
            return step(*inputs)
        finally:
            self._state.restore()
            self._note.clear()
            self.clock.add_step(time.monotonic() - began_s, call.watch)


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are noted."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], call: OpenCall, watcher: StepWatcher
    ) -> None:
        self._coroutine, self._call, self._watcher = coroutine, call, watcher

    def send(self, value: Any) -> Any:
        return self._watcher.run(self._call, self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._watcher.run(self._call, self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()
