"""SandboxTools: an interpreter of Python and a shell of one episode, in a sandbox."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from spmd_rl.environments.tools.driver import DRIVER
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.rewards.code.sandbox_session import SandboxSession, SessionEnded
from spmd_rl.rewards.config import CodeConfig

# An episode has more time of the processor than one test of a program.
TOOL_LIMITS = CodeConfig(cpu_s=60, file_mb=16)

Tool = Literal["python", "shell"]


class SandboxTools:
    """Tools that keep their state over the calls of an episode: names of Python, and files.

    They run in the sandbox that grades programs (docs/rewards.md): they see no file of this host,
    no network and no variable of the run. A call may take `call_s` seconds and show the policy
    `max_characters`. Python and the shell share their files in /tmp. They begin with the first
    call, and anew after a call that was ended; then the policy is told that all is lost.

    Raises: ConfigError for limits that are none.
    """

    def __init__(
        self, limits: CodeConfig = TOOL_LIMITS, call_s: float = 10.0, max_characters: int = 4000
    ) -> None:
        if limits.command:
            raise ConfigError("graders.code.command must be empty for tools: they run Python")
        if call_s <= 0 or max_characters < 1:
            raise ConfigError("call_s and max_characters must be more than 0")
        self._limits = replace(limits, output_kb=max(limits.output_kb, 8 * max_characters >> 10))
        self._call_s, self._max_characters = call_s, max_characters
        self._session: SandboxSession | None = None
        self._num_calls = 0

    async def python(self, code: str) -> str:
        """Return what the code prints, with the value of its last line if that is an expression.

        Raises: EpisodeFailure of the kind "sandbox" when the sandbox cannot start.
        """
        return await self._call("python", code)

    async def shell(self, command: str) -> str:
        """Return what a command of /bin/sh prints. Raises: as `python` does."""
        return await self._call("shell", command)

    async def close(self) -> None:
        """End all that the calls have started."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, tool: Tool, text: str) -> str:
        self._num_calls += 1
        session = await self._opened()
        request = {
            "id": self._num_calls,
            "tool": tool,
            "text": text.encode(errors="replace").decode(),
            "max_bytes": 4 * self._max_characters,
        }
        try:
            answer = await session.ask(request, self._call_s)
            if answer.get("id") != self._num_calls or not isinstance(answer.get("text"), str):
                await session.close()
                raise SessionEnded("exit")
            return self._shown(answer["text"], answer.get("size"))
        except ValueError as error:
            return f"[{error}]"
        except SessionEnded as ended:
            self._session = None
            why = {
                "exit": "the program has ended",
                "time": f"it took longer than {self._call_s:g} s and was ended",
                "output": "it printed too much and was ended",
            }[ended.ended_by]
            return f"[{why}; names and files are lost]"

    async def _opened(self) -> SandboxSession:
        if self._session is None:
            session = SandboxSession(self._limits, DRIVER)
            try:
                await session.open()
            except (SpmdError, OSError) as error:
                raise EpisodeFailure("sandbox", str(error)) from error
            self._session = session
        return self._session

    def _shown(self, text: str, size: Any) -> str:
        """Return what the policy sees of a text, which had so many bytes."""
        shown = text[: self._max_characters].encode(errors="replace").decode()
        is_cut = len(text) > len(shown) or (isinstance(size, int) and size > len(text.encode()))
        return f"{shown}\n[the rest is left out]" if is_cut else shown.rstrip("\n")
