"""Server of a process of hooks: plain functions run in order, async ones all at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import traceback
from collections import deque
from typing import Any

from msgspec.structs import replace

from spmd_rl.errors import ContractError
from spmd_rl.hooks.child.async_calls import OpenCall, StepWatcher
from spmd_rl.hooks.child.calls import EpisodeCall, LoadedHooks, RewardCall
from spmd_rl.hooks.child.episode_engine import EpisodeEngine, RefusedTurn
from spmd_rl.hooks.child.process_state import ProcessState, SeedWatch
from spmd_rl.hooks.failures import EpisodeFailure, FailureKind
from spmd_rl.hooks.program import EpisodeProgram, Site
from spmd_rl.hooks.results import preview, problem_of
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.hooks.wire.channel import CallNote, MessageReader, encode
from spmd_rl.hooks.wire.messages import (
    CLOSE_S,
    TO_PROCESS,
    Answer,
    Answers,
    Calls,
    Cancel,
    DrawnTokens,
    Episode,
    Problem,
    Ready,
    Reply,
    Start,
    ToProcess,
    ToRank,
)

TOGETHER_S = 0.002  # plain calls that end within this time are checked and answered together
GRACE_S = 5.0  # for a call to end once it was cancelled
SHORTEST_WAIT_S = 0.05  # between two looks at the time of a call


def serve(
    sock: socket.socket, note: CallNote, seeds: SeedWatch, hooks: LoadedHooks, start: Start
) -> None:
    """Open the program of episodes, tell the rank, and serve calls until it ends.

    Plain functions run on the main thread, outside of the event loop, so that they may use signals
    and loops of their own.
    """
    loop = asyncio.new_event_loop()
    site = Site(start.config, start.rank, start.model, EpisodeTexts.of_folder(start.model))
    if hooks.program is not None:
        try:
            loop.run_until_complete(hooks.program.open(site))
        # a user's program may raise anything
        except BaseException as error:  # noqa: BLE001
            problem = f"hooks.generate {start.generate!r}: open "
            problem += problem_of(error, hooks.program.open)
            sock.sendall(encode(Ready([], problem)))
            return
    sock.sendall(encode(Ready([reward.form for reward in hooks.rewards])))
    server = Server(loop, note, ProcessState(seeds), hooks, start, site.texts)
    loop.run_until_complete(loop.connect_accepted_socket(lambda: server, sock))
    while not server.ended:
        server.run_plain()
        # a hook may stop the loop, and a task of it may raise these
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
    if hooks.program is not None:
        _close(loop, hooks.program)
    os._exit(0)  # threads of hooks may still run


class Server(asyncio.Protocol):
    """Runs the calls that the rank sends, and answers each of them once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        note: CallNote,
        state: ProcessState,
        hooks: LoadedHooks,
        start: Start,
        texts: EpisodeTexts,
    ) -> None:
        self.ended = False
        self._loop, self._note, self._state = loop, note, state
        self._hooks, self._start, self._texts = hooks, start, texts
        self._reader = MessageReader(TO_PROCESS)
        self._transport: Any = None
        self._plain: deque[RewardCall] = deque()
        self._together_s = TOGETHER_S
        self._watcher = StepWatcher(note, state)
        self._open: dict[int, OpenCall] = {}
        self._engines: dict[int, EpisodeEngine] = {}
        loop.set_task_factory(self._watcher.new_task)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._take(message)
        if self._plain:
            self._loop.stop()  # `serve` runs them

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._loop.stop()

    def run_plain(self) -> None:
        """Make all plain calls in order. Calls that end within a short time are checked together:
        if one of them has changed the process, each is made again and checked alone.
        """
        while self._plain:
            calls, answers, began_s = list[RewardCall](), list[Answer](), time.monotonic()
            while self._plain and (not calls or time.monotonic() - began_s < self._together_s):
                calls.append(self._plain.popleft())
                self._note.write(calls[-1].call_id)
                answers.append(_answer_to(calls[-1]))
            if len(calls) > 1:  # which one has closed descriptors is not known
                self._note.clear()
            has_changed = self._state.restore()
            self._note.clear()
            if has_changed and len(calls) > 1:
                self._together_s = 0.0
                if not self._state.is_worn:
                    self._plain.extendleft(call.again() for call in reversed(calls))
                    continue
                answers = [Problem(call.call_id, 0.0, "", in_doubt=True) for call in calls]
            if self._state.is_worn:
                answers[-1] = replace(answers[-1], retires=True)
            self._send(Answers(answers))
            if self._state.is_worn:
                os._exit(0)

    def _take(self, message: ToProcess) -> None:
        match message:
            case Calls():
                for call in self._hooks.reward_calls(message):
                    if call.reward.form.is_async:
                        self._begin(call, self._start.deadline_s)
                    else:
                        self._plain.append(call)
            case Episode():
                episode = self._hooks.episode_call(message, self._send)
                self._begin(episode, self._start.episode_deadline_s)
            case Cancel(call_id):
                if call_id in self._open:
                    self._cancel(self._open[call_id], "was cancelled")
            case Reply(call_id, ask_id, problem, turn):
                if engine := self._engines.get(call_id):
                    engine.answer(ask_id, RefusedTurn(problem) if turn is None else turn)
            case DrawnTokens(call_id, ask_id, tokens):
                if engine := self._engines.get(call_id):
                    engine.show(ask_id, tokens)

    def _begin(self, job: RewardCall | EpisodeCall, deadline_s: float) -> None:
        """Begin an async call."""
        call = OpenCall(job, deadline_s, self._watcher.clock)
        self._open[job.call_id] = call
        if isinstance(job, EpisodeCall):
            self._engines[job.call_id] = EpisodeEngine(job, self._send, call.watch, self._texts)

        async def main() -> Any:
            if isinstance(job, RewardCall):
                return await job.start()
            return await job.function(job.context, job.prompt, self._engines[job.call_id])

        call.main = self._watcher.start(self._loop, call, main())
        call.main.add_done_callback(lambda _: self._close(call))
        if deadline_s:
            call.timer = self._loop.call_later(deadline_s, self._check_time, call)

    def _close(self, call: OpenCall) -> None:
        """Answer a call that has ended, and end what it left running."""
        if call.timer:
            call.timer.cancel()
        if call.end_sentence:
            self._give_up(call, "")
        elif call.job.call_id in self._open:
            answer = self._watcher.run(call, self._answer_of, call)
            if self._state.is_worn:
                doubt = {"in_doubt": True} if isinstance(answer, Problem) else {}
                answer = replace(answer, retires=True, **doubt)
            self._reply(call, answer)
        for task in list(call.tasks):
            task.cancel()

    def _answer_of(self, call: OpenCall) -> Answer:
        try:
            return call.job.answer(call.main.result(), call.watch.used_s)
        # a user's function may raise anything
        except BaseException as error:  # noqa: BLE001
            if isinstance(error, EpisodeFailure) and isinstance(call.job, EpisodeCall):
                told = f"{error.kind}: {preview(error, str)}"
                return Problem(call.job.call_id, call.watch.used_s, told, kind=error.kind)
            problem = problem_of(error, call.job.function)
            return Problem(call.job.call_id, call.watch.used_s, problem)

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
        call.timer = self._loop.call_later(GRACE_S, self._give_up, call, still)
        call.main.cancel()

    def _give_up(self, call: OpenCall, more: str) -> None:
        """Answer for a call that was cancelled, which may have left threads or a task running."""
        told = call.job.call_id, call.watch.used_s, call.end_sentence + more
        kind: FailureKind | None = "timeout" if isinstance(call.job, EpisodeCall) else None
        self._reply(call, Problem(*told, retires=True, unanswered=True, kind=kind))

    def _reply(self, call: OpenCall, answer: Answer) -> None:
        """Answer a call, if it was not answered yet."""
        if self._open.pop(call.job.call_id, None):
            self._engines.pop(call.job.call_id, None)
            try:
                self._send(Answers([answer]))
            except ContractError as error:  # a sample's metadata may hold anything
                problem = problem_of(error, call.job.function)
                self._send(Answers([Problem(answer.call_id, answer.seconds, problem)]))

    def _send(self, message: ToRank) -> None:
        self._state.end_if_forked()
        self._transport.write(encode(message))


def _close(loop: asyncio.AbstractEventLoop, program: EpisodeProgram) -> None:
    """Let a program end what it has started. The rank shows what goes wrong, as the run ends."""
    try:
        loop.run_until_complete(asyncio.wait_for(program.close(), CLOSE_S))
    except BaseException:  # noqa: BLE001  a user's program may raise anything
        traceback.print_exc()


def _answer_to(call: RewardCall) -> Answer:
    """Call a plain function once."""
    began_s = time.monotonic()
    try:
        return call.answer(call.start(), time.monotonic() - began_s)
    # a user's function may raise anything
    except BaseException as error:  # noqa: BLE001
        problem = problem_of(error, call.function)
        return Problem(call.call_id, time.monotonic() - began_s, problem)
