"""Lifecycle of a worker: it answers the controller in the background, and decides when to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from spmd_rl.controller.channel.dealer import Dealer
from spmd_rl.controller.channel.messages import (
    Bye,
    Dying,
    Hello,
    Ping,
    Pong,
    Signalled,
    StackRequest,
    Stacks,
    Stop,
    ToWorker,
    refusals,
)
from spmd_rl.controller.channel.secret import FILE_ENV, SECRET_ENV, Keys
from spmd_rl.controller.lifecycle.process_tree import is_ending, kill_children
from spmd_rl.controller.lifecycle.shutdown import FinalMessage, end_process
from spmd_rl.controller.lifecycle.stacks import all_stacks, flight_record, main_thread_location
from spmd_rl.controller.lifecycle.watchdog import Watchdog
from spmd_rl.errors import LostRankError


class WorkerLifecycle:
    """Connects a worker to its controller, and ends the process when either side has to end.

    It says Hello through a Dealer of its own, `dealer`. `abandon` is called when the controller has
    been given up, before the process ends. `on_idle` is called a few times a second, between two
    messages. `counts` returns what the roles count, once a second.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Keys,
        generation: int,
        hello: Hello,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.final_message = FinalMessage()
        self.checkpoints = ""  # the folder of the run's checkpoints, once the controller sent it
        self.on_idle: Callable[[], None] = lambda: None
        self.counts: Callable[[], dict[str, int]] = dict
        self._hello = hello
        self._endpoint = endpoint
        self._abandon = abandon
        self._launcher = os.getppid()
        self._watchdog = Watchdog(endpoint, self._launcher, time.monotonic())
        self.dealer = Dealer(endpoint, keys, generation, hello.rank, self)
        self.dealer.catch_signals(signal.SIGTERM, signal.SIGINT)
        self.dealer.post(hello)
        self.dealer.start()

    def await_end(self, seconds: float) -> None:
        """Give the controller `seconds` to end this process with the sentence that it knows.

        Blocks: for all of that time, or until this process ends.
        """
        threading.Event().wait(seconds)

    def close(self) -> signal.Signals | None:
        """Close the dealer; return a signal that the launcher sent, if it sent any.

        Blocks: for the socket's linger at most.
        """
        undrained = self.dealer.close()
        return self._watchdog.signal or next(iter(undrained), None)

    def on_message(self, message: ToWorker) -> None:
        """Answer a ping or a request for stacks, or end the process when told to stop."""
        match message:
            case Ping(lost_after_s, checkpoints):
                self.checkpoints = checkpoints
                self._watchdog.pinged(lost_after_s, time.monotonic())
                self.dealer.post(Pong(self.counts()))
            case StackRequest():
                self._post_stacks()
            case Stop(sentence, exit_code, lost):
                self._post_stacks()
                self.dealer.post(Bye())
                # The launcher of the start: a process that has lost its launcher ends by itself.
                kill_children(self._launcher, lost)
                self._end(sentence, exit_code)

    def on_tick(self, now: float) -> None:
        """End this process if its launcher or its controller is lost."""
        if reason := self._watchdog.launcher_lost(os.getppid()):
            self._die(reason)
        if reason := self._watchdog.controller_lost(now):
            self._abandon()
            self._die(reason)
        self.on_idle()

    def on_signal(self, number: signal.Signals) -> None:
        """Report a signal of the launcher to the controller, which decides how the run ends.

        A launcher that is killed sends none itself: torch has the kernel send SIGINT then.
        """
        parent = 0 if is_ending(self._launcher) else os.getppid()
        if reason := self._watchdog.launcher_lost(parent):
            self._die(reason)
        if self._watchdog.signalled(number, time.monotonic()):
            self.dealer.post(Signalled(number.name))

    def on_disconnected(self) -> None:
        """Note that the connection to the controller has closed."""
        self._watchdog.disconnected(time.monotonic())

    def on_handshake_failed(self) -> None:
        """End this process: the controller holds another secret."""
        self._end(
            f"rank {self._hello.rank} and the controller at {self._endpoint} hold different "
            f"secrets: give every rank the same {SECRET_ENV} or {FILE_ENV}, or none",
            2,
        )

    def _post_stacks(self) -> None:
        stacks = Stacks(main_thread_location(), all_stacks(), self.dealer.refused)
        self.dealer.post(stacks, (b"", flight_record()))

    def _die(self, reason: str) -> None:
        sentence = reason + refusals(self.dealer.refused)
        self.dealer.post(Dying(sentence))
        error = LostRankError(f"{self._hello} {sentence}")
        self._end(self.final_message.compose(error), 1)

    def _end(self, sentence: str, exit_code: int) -> None:
        """End the process from this thread.

        The main thread may be inside a collective that never finishes.
        """
        self.dealer.close_for_exit()
        end_process(sentence, exit_code)
