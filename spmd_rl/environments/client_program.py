"""Command of an agent: a client program of any language, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from spmd_rl.controller.lifecycle.process_family import MARK_ENV, end_family
from spmd_rl.environments.client_agents import (
    MAX_NOTE,
    ClientSession,
    ended,
    require_reward,
    rewarded,
    task_of,
)
from spmd_rl.environments.client_errors import after_error, names_in
from spmd_rl.environments.config import OnError
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EPISODE_ENV = "SPMD_RL_EPISODE"  # each process of an episode's program has it
KEPT_ENV = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", MARK_ENV)
TASK_FILE, RESULT_FILE = "task.json", "result.json"
_PLACE = re.compile(r"\{(base_url|key|task|task_file)\}")
MAX_RESULT_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_TAIL_BYTES = 4000


class CommandAgent:
    """Runs one command for each episode, in an empty folder that is gone after it.

    Files in its words are found from the folder of the run. {base_url}, {key}, {task} and
    {task_file} are replaced in its words. They are in its
    environment too, under the names that the clients of OpenAI and Anthropic read. Of the run's
    environment it has nothing but PATH, language, time zone and the places of Python's modules.
    """

    def __init__(
        self, command: str, variables: Mapping[str, str], on_error: OnError = "zero"
    ) -> None:
        self._words = command_words(command)
        self._variables, self._on_error = dict(variables), on_error

    async def play(self, ctx: HookContext, prompt: Prompt, session: ClientSession) -> list[Sample]:
        """Run the program to its end, and return what it has drawn.

        The end of its output is noted beside the sample. `result.json` in its folder may hold a
        reward, or a dict with one.
        Raises: EpisodeFailure of the kind "agent" when it cannot be started, or ends with an error
        that the policy has not caused.
        """
        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            task = task_of(prompt)
            (Path(folder) / TASK_FILE).write_text(json.dumps(task), encoding="utf-8")
            code, output, errors = await self._run(Path(folder), session, str(task["question"]))
            for name, text in (("stdout", output), ("stderr", errors)):
                if text:
                    ctx.note(name, text[-MAX_NOTE:])
            path = Path(folder) / RESULT_FILE
            if code:
                said = (errors.strip() or "it said nothing").splitlines()[-1]
                failure = EpisodeFailure("agent", f"the program ended with {code}: {said}")
                told = session.samples(), failure, names_in(errors), self._on_error
                return rewarded(after_error(*told, is_over=session.is_over), _result(path))
            samples = ended(session, _result(path))
            require_reward(ctx, prompt, samples, f"the program left no reward in {RESULT_FILE}")
            return samples

    async def _run(
        self, folder: Path, session: ClientSession, question: str
    ) -> tuple[int, str, str]:
        """Return the exit code, and the ends of both output streams."""
        mark = token_hex(16)
        values = {
            "base_url": session.base_url,
            "key": session.key,
            "task": question,
            "task_file": str(folder / TASK_FILE),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *(_filled(word, values) for word in self._words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env=self._environment(folder, session, values) | {EPISODE_ENV: mark},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise EpisodeFailure("agent", f"the program cannot be started: {error}") from error
        assert process.stdout is not None
        assert process.stderr is not None
        tails = [asyncio.create_task(_tail(one)) for one in (process.stdout, process.stderr)]
        has_ended = False
        try:
            # process.wait() would wait for all that holds its output open
            await _exit_of(process.pid)
            has_ended = True
        finally:
            await asyncio.shield(asyncio.to_thread(end_family, process.pid, mark, EPISODE_ENV))
            if not has_ended:  # of one that has ended, kill could take the exit code from asyncio
                with suppress(ProcessLookupError):
                    process.kill()
            code = await asyncio.shield(process.wait())
        output, errors = [await one for one in tails]
        return code, output, errors

    def _environment(
        self, folder: Path, session: ClientSession, values: Mapping[str, str]
    ) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        return kept | {
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": session.root_url,
            "ANTHROPIC_API_KEY": session.key,
            **{f"AGENT_{name.upper()}": value for name, value in values.items()},
            **self._variables,
        }


def command_words(command: str) -> list[str]:
    """Return the words of a command line, with absolute paths for files that are there.

    The program runs in a folder of its own. Its own name is looked up in PATH unless it has a
    slash.
    Raises: ConfigError for a command line that is none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"agent.name = {command!r}: {error}") from error
    if not words:
        raise ConfigError("agent.name is empty: write the command line of the agent")
    program, *others = words
    first = program if os.sep not in program else _absolute(program)
    return [first, *map(_absolute, others)]


def _absolute(word: str) -> str:
    return os.path.abspath(word) if os.path.isfile(word) else word


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of the command with its places filled. What fills them is not searched."""
    return _PLACE.sub(lambda found: values[found[1]], word)


async def _exit_of(pid: int) -> None:
    """Wait until a child has ended, whatever it has started."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended, and was reaped
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _tail(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end, and return the last part of it."""
    tail = b""
    while data := await stream.read(_READ_BYTES):
        tail = (tail + data)[-_TAIL_BYTES:]
    return tail.decode(errors="replace")


def _result(path: Path) -> Any:
    """Return what a program has left as its result; None without one."""
    try:
        if path.is_symlink() or path.stat().st_size > MAX_RESULT_BYTES:
            raise EpisodeFailure("agent", f"{RESULT_FILE} is a link, or larger than 1 MiB")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise EpisodeFailure("agent", f"{RESULT_FILE} cannot be read: {error}") from error
