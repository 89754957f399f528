"""SandboxSession: a program in a sandbox that lives for several requests, and answers each."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from subprocess import PIPE
from typing import Any, Literal

from spmd_rl.errors import SpmdError
from spmd_rl.rewards.code.sandbox import START_S, start_in_sandbox
from spmd_rl.rewards.code.sandbox_command import FOLDER, program_command
from spmd_rl.rewards.config import CodeConfig

MAX_REQUEST = 48_000  # bytes: less than a pipe holds, so that no write waits
_READ_BYTES = 1 << 16
_DRIVER = "driver.py"

Ending = Literal["exit", "time", "output"]


class SessionEnded(Exception):
    """The program of a session has ended, or was ended: by itself, or at a limit."""

    def __init__(self, ended_by: Ending) -> None:
        super().__init__(ended_by)
        self.ended_by: Ending = ended_by


class SandboxSession:
    """One program of `program`, which reads requests from its stdin and answers on its stdout, each
    as a line of JSON. An event loop owns it.

    What it answers is the word of a program that may be hostile: it has whatever keys and values.
    """

    def __init__(self, cfg: CodeConfig, program: str) -> None:
        self._cfg, self._program = cfg, program
        self._stack = ExitStack()
        self._in = self._out = -1
        self._held = b""

    async def open(self) -> None:
        """Start the program. Blocks: until it runs. Raises: SpmdError when the sandbox cannot."""
        # its thread is one of the loop's, which live as long as the process
        started = await asyncio.to_thread(
            start_in_sandbox,
            self._cfg,
            [*program_command(self._cfg), f"{FOLDER}/{_DRIVER}"],
            {_DRIVER: self._program.encode()},
            PIPE,
            self._stack,
        )
        process = started.process
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        for descriptor in (self._in, self._out):
            os.set_blocking(descriptor, False)
        if not started.has_begun:
            await self.close()
            raise SpmdError("the sandbox did not start")
        try:
            await asyncio.wait_for(self._line(self._cfg.output_kb << 10), START_S)
        except (SessionEnded, TimeoutError) as error:
            await self.close()
            raise SpmdError("the sandbox did not start: its program gives no sign") from error

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the program's answer to a request.

        Blocks: until then, for so many seconds at most.
        Raises: SessionEnded when the program has ended or says too much, or the seconds are over;
        the session is then closed. ValueError for a request that is too long.
        """
        data = json.dumps(request).encode() + b"\n"
        if len(data) > MAX_REQUEST:
            raise ValueError(f"the request has {len(data)} bytes, and {MAX_REQUEST} are the most")
        try:
            if os.write(self._in, data) < len(data):
                raise SessionEnded("time")  # it has not read what came before
            line = await asyncio.wait_for(self._line(self._cfg.output_kb << 10), seconds)
            answer = json.loads(line)
        except SessionEnded:
            await self.close()
            raise
        except (TimeoutError, BlockingIOError) as error:
            await self.close()
            raise SessionEnded("time") from error
        except (BrokenPipeError, ValueError, RecursionError) as error:
            await self.close()
            raise SessionEnded("exit") from error
        return answer if isinstance(answer, dict) else {}

    async def close(self) -> None:
        """End the program and all that it has started. It may be called twice.

        Blocks: until they are gone.
        """
        stack, self._stack = self._stack, ExitStack()
        self._in = self._out = -1
        await asyncio.shield(asyncio.to_thread(stack.close))

    async def _line(self, max_bytes: int) -> bytes:
        """Wait for a line of the program."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._held:
            if len(self._held) > max_bytes:
                raise SessionEnded("output")
            ready = asyncio.Event()
            loop.add_reader(self._out, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._out)
            try:
                data = os.read(self._out, _READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                raise SessionEnded("exit")
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        return line
