"""Command of an agent: a client program of any language, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shlex
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from shutil import which
from typing import Any

from spmd_rl.controller.lifecycle.process_family import END_S, MARK_ENV, end_family
from spmd_rl.environments.client_agents import (
    MAX_NOTE,
    end_samples,
    rewarded,
    task_of,
)
from spmd_rl.environments.client_errors import after_error, names_in
from spmd_rl.environments.config import OnError
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.session import Session
from spmd_rl.hooks import child
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EPISODE_ENV = "SPMD_RL_EPISODE"  # each process of an episode's program has it
KEPT_ENV = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", MARK_ENV)
TASK_FILE, RESULT_FILE = "task.json", "result.json"
_PLACE = re.compile(r"\{(base_url|key|task|task_file)\}")
KEEPER = str(Path(child.__file__).with_name("keeper.py"))
MAX_RESULT_BYTES = 1 << 20
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
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

    async def play(self, ctx: HookContext, prompt: Prompt, session: Session) -> list[Sample]:
        """Run the program to its end, and return what it has drawn.

        The end of its output is noted beside the sample. `result.json` in its folder may hold a
        reward, or a dict with one.
        Raises: EpisodeFailure of the kind "agent" when it cannot be started, or ends with an error
        that the policy has not caused.
        """
        made = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
        try:
            return await self._play(ctx, prompt, session, Path(made.name))
        finally:  # it may hold a million files
            await asyncio.shield(asyncio.to_thread(made.cleanup))

    async def _play(
        self, ctx: HookContext, prompt: Prompt, session: Session, folder: Path
    ) -> list[Sample]:
        task = task_of(prompt)
        (folder / TASK_FILE).write_text(json.dumps(task), encoding="utf-8")
        code, output, errors = await self._run(folder, session, str(task["question"]))
        for name, text in (("stdout", output), ("stderr", errors)):
            if text:
                ctx.note(name, text[-MAX_NOTE:])
        if code:
            said = (errors.strip() or "it said nothing").splitlines()[-1]
            failure = EpisodeFailure("agent", f"the program ended with {code}: {said}")
            told = session.samples(), failure, names_in(errors), self._on_error
            samples = after_error(*told, is_over=session.is_over)
            return rewarded(samples, _result(folder / RESULT_FILE))
        no_reward = f"the program left no reward in {RESULT_FILE}"
        return end_samples(ctx, prompt, session, _result(folder / RESULT_FILE), no_reward)

    async def _run(self, folder: Path, session: Session, question: str) -> tuple[int, str, str]:
        """Return the exit code, and the ends of both output streams."""
        mark = token_hex(16)
        values = {
            "base_url": session.base_url,
            "key": session.key,
            "task": question,
            "task_file": str(folder / TASK_FILE),
        }
        # what fills a place is not searched for places
        words = [_PLACE.sub(lambda found: values[found[1]], word) for word in self._words]
        environment = self._environment(folder, session, values) | {EPISODE_ENV: mark}
        told, tells = os.pipe()
        try:
            keeper = await _keeper(folder, tells)
        except OSError as error:
            os.close(told)
            raise EpisodeFailure("agent", f"the program cannot be started: {error}") from error
        finally:
            os.close(tells)
        tails = bytearray(), bytearray()
        reads = [
            asyncio.create_task(_read_tail(stream, tail))
            for stream, tail in zip((keeper.stdout, keeper.stderr), tails, strict=True)
            if stream is not None
        ]
        try:
            await _ask(keeper, words, environment)
            ending = await _read_all(told)
        finally:
            os.close(told)
            await asyncio.shield(asyncio.to_thread(_end, keeper.pid, mark))
        # what is outside of the family may hold the output open, for which asyncio would wait
        _, still = await asyncio.wait(reads, timeout=END_S)
        for read in still:
            read.cancel()
        await keeper.wait()  # its watcher reaps it: closing the transport would do so first
        output, errors = (tail.decode(errors="replace") for tail in tails)
        why, is_missing, code = ending.rpartition("\n")
        if is_missing:
            raise EpisodeFailure("agent", f"the program cannot be started: {why}")
        return int(code or -signal.SIGKILL), output, errors

    def _environment(
        self, folder: Path, session: Session, values: Mapping[str, str]
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


def check_command(command: str, variables: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a command whose program, or its script, is not on this host."""
    program, *others = command_words(command)
    if not _PLACE.search(program) and not which(program, path=variables.get("PATH")):
        what = "no file that may be run" if os.sep in program else "no program in PATH"
        raise ConfigError(f"agent.name = {command!r}: {program!r} is {what}")
    scripts = (one for one in others if one.endswith(SCRIPTS) and not _PLACE.search(one))
    script = next(scripts, "")
    if script and not script.startswith("-") and not os.path.isfile(script):
        raise ConfigError(
            f"agent.name = {command!r}: there is no file {script!r} in {os.getcwd()}, "
            "the folder from which its files are found"
        )


def _absolute(word: str) -> str:
    return os.path.abspath(word) if os.path.isfile(word) else word


async def _keeper(folder: Path, tells: int) -> asyncio.subprocess.Process:
    """Start the keeper of a program, which tells its end on this descriptor."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", KEEPER, str(tells)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={},
        pass_fds=[tells],
        start_new_session=True,
    )


async def _ask(
    keeper: asyncio.subprocess.Process, words: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Have a keeper start a program. Raises: EpisodeFailure for what no program can be given."""
    given = [str(len(words)), *words, *(f"{name}={value}" for name, value in environment.items())]
    try:
        data = [os.fsencode(one) for one in given]
        if any(b"\0" in one for one in data):
            raise ValueError("embedded null byte")
    except ValueError as error:
        raise EpisodeFailure("agent", f"the program cannot be started: {error}") from error
    assert keeper.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it has been killed
        keeper.stdin.write(b"".join(one + b"\0" for one in data))
        await keeper.stdin.drain()
    keeper.stdin.close()


def _end(keeper: int, mark: str) -> None:
    """Kill what a keeper keeps, and let it reap that and end. Blocks: until then."""
    end_family(keeper, mark, EPISODE_ENV)
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(keeper)
        try:
            os.kill(keeper, signal.SIGCONT)
            if not select.select([descriptor], [], [], END_S)[0]:
                os.kill(keeper, signal.SIGKILL)
        finally:
            os.close(descriptor)


async def _read_all(descriptor: int) -> str:
    """Return what comes from a pipe until its other end is closed."""
    loop, stream = asyncio.get_running_loop(), asyncio.StreamReader()
    with open(os.dup(descriptor), "rb", buffering=0) as pipe:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        try:
            return (await stream.read()).decode()
        finally:
            transport.close()


async def _read_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read a stream to its end, or until cancelled, and keep the last part of it."""
    try:
        while data := await stream.read(_READ_BYTES):
            tail += data
            del tail[:-_TAIL_BYTES]
    finally:
        stream._transport.close()  # type: ignore[attr-defined]


def _result(path: Path) -> Any:
    """Return what a program has left as its result; None without one."""
    try:
        # a pipe without a writer would be waited for
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_RESULT_BYTES:
                raise EpisodeFailure("agent", f"{RESULT_FILE} is no file, or larger than 1 MiB")
            with open(descriptor, "rb", closefd=False) as file:
                return json.loads(file.read())
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problem = "is a link" if path.is_symlink() else f"cannot be read: {error}"
        raise EpisodeFailure("agent", f"{RESULT_FILE} {problem}") from error
