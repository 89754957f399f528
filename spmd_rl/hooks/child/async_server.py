"""Server of async hooks: rewards and episodes, many at once in one event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from spmd_rl.controller.channel.codec import pack
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.child.episode_calls import EpisodeCall, episodes_of
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.child.process_state import ProcessState
from spmd_rl.hooks.child.rank_link import RankLink
from spmd_rl.hooks.child.reward_calls import RewardCall, calls_of, problem_of
from spmd_rl.hooks.child.watched_steps import NotedThreads, OpenCall, StepWatcher
from spmd_rl.hooks.wire.frames import frame
from spmd_rl.hooks.wire.messages import (
    Answer,
    Calls,
    Cancel,
    Drawn,
    Encoded,
    Episodes,
    Problem,
    Refused,
    Serve,
    Text,
    ToProcess,
    ToRank,
)
from spmd_rl.hooks.wire.running_note import RunningNote

GRACE_S = 5.0  # for a call to end once it was cancelled
SHORTEST_WAIT_S = 0.05  # between two looks at the time of a call


def serve_async(
    link: RankLink, note: RunningNote, state: ProcessState, hooks: LoadedHooks, serve: Serve
) -> None:
    """Serve calls until the rank ends."""
    loop = asyncio.new_event_loop()
    server = AsyncServer(loop, link, StepWatcher(note, state), hooks, serve)
    loop.set_default_executor(NotedThreads(note, serve.concurrency))
    loop.run_until_complete(loop.connect_accepted_socket(lambda: server, link.socket))
    while not server.ended:
        try:
            loop.run_forever()  # a hook may stop the loop
        except (SystemExit, KeyboardInterrupt):  # a task of a hook has raised it
            continue
    os._exit(0)  # threads of hooks may still run


class AsyncServer(asyncio.Protocol):
    """Runs the calls that the rank sends, and answers each of them once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: RankLink,
        watcher: StepWatcher,
        hooks: LoadedHooks,
        serve: Serve,
    ) -> None:
        self.ended = False
        self._loop, self._link, self._watcher = loop, link, watcher
        self._hooks, self._serve = hooks, serve
        self._open: dict[int, OpenCall] = {}
        self._engines: dict[int, EpisodeEngine] = {}
        self._transport: Any = None
        loop.set_task_factory(watcher.new_task)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.data_received(b"")  # messages may have come before

    def data_received(self, data: bytes) -> None:
        self._link.feed(data)
        while (message := self._link.next()) is not None:
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._loop.stop()

    def _take(self, message: ToProcess) -> None:
        match message:
            case Calls():
                for call in calls_of(message, self._hooks):
                    self._start(call, call.reward.function, self._serve.deadline_s)
            case Episodes():
                for episode in episodes_of(message, self._hooks):
                    self._start(episode, self._hooks.generate, self._serve.episode_deadline_s)
            case Cancel(call_id):
                if call_id in self._open:
                    self._cancel(self._open[call_id], "was cancelled")
            case (
                Drawn(call_id, ask_id, answer)
                | Encoded(call_id, ask_id, answer)
                | Text(call_id, ask_id, answer)
            ):
                self._answer(call_id, ask_id, answer)
            case Refused(call_id, ask_id, problem):
                self._answer(call_id, ask_id, SpmdError(problem))

    def _start(self, job: RewardCall | EpisodeCall, function: Any, deadline_s: float) -> None:
        call = OpenCall(job.call_id, function, deadline_s, self._watcher.clock)
        self._open[call.call_id] = call
        begin: Callable[[], Any]
        if isinstance(job, EpisodeCall):
            engine = EpisodeEngine(job, self._send, call.watch)
            self._engines[call.call_id] = engine
            begin = partial(function, job.context, job.prompt, engine)
        else:
            begin = job.start
        call.main = self._watcher.start(self._loop, call, self._run(call, begin, job))
        call.main.add_done_callback(lambda _: self._close(call))
        if deadline_s:
            call.timer = self._loop.call_later(deadline_s, self._check_time, call)

    async def _run(
        self, call: OpenCall, begin: Callable[[], Any], job: RewardCall | EpisodeCall
    ) -> None:
        """Call the function and answer the rank."""
        try:
            result = await begin()
            if not call.end_sentence:
                answer = job.answer(result, call.watch.used_s)
                spoiled = self._watcher.is_worn()
                self._reply(call, replace(answer, spoiled=True) if spoiled else answer)
        # a user's function may raise anything
        except BaseException as error:  # noqa: BLE001
            if not call.end_sentence:
                damaged = self._watcher.state.damaged
                problem = problem_of(error, call.function)
                used_s = call.watch.used_s
                self._reply(call, Problem(call.call_id, used_s, problem, damaged, damaged))

    def _close(self, call: OpenCall) -> None:
        """Forget a call that has ended, and end what it left running."""
        self._reply_cancelled(call, "")
        if call.timer:
            call.timer.cancel()
        for task in list(call.tasks):
            task.cancel()

    def _check_time(self, call: OpenCall) -> None:
        left_s = call.deadline_s - call.watch.used_s
        if left_s > 0:  # the call has waited for others meanwhile
            wait_s = max(left_s, SHORTEST_WAIT_S)
            call.timer = self._loop.call_later(wait_s, self._check_time, call)
        else:
            self._cancel(call, f"took longer than {call.deadline_s:g} s")

    def _cancel(self, call: OpenCall, sentence: str) -> None:
        """Ask a call to end, and give up on it if it does not."""
        call.end_sentence = sentence
        if call.timer:
            call.timer.cancel()
        still = ", and went on after it was cancelled"
        call.timer = self._loop.call_later(GRACE_S, self._reply_cancelled, call, still)
        call.main.cancel()

    def _reply_cancelled(self, call: OpenCall, more: str) -> None:
        """Answer for a call that was cancelled, which may have left threads or a task running."""
        problem = (call.end_sentence or "ended without an answer") + more
        self._reply(call, Problem(call.call_id, call.watch.used_s, problem, spoiled=True))

    def _reply(self, call: OpenCall, answer: Answer) -> None:
        """Send the answer to a call, if there was none yet."""
        if call.call_id in self._open:
            self._send(answer)
            del self._open[call.call_id]
            self._engines.pop(call.call_id, None)

    def _answer(self, call_id: int, ask_id: int, value: Any) -> None:
        if engine := self._engines.get(call_id):
            engine.answer(ask_id, value)

    def _send(self, message: ToRank) -> None:
        self._watcher.state.end_if_forked()
        self._transport.write(frame(pack(message)))
