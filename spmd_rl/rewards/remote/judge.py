"""Grader that asks a language model whether a response passes criteria, and keeps its verdicts.

Verdicts are kept by what was asked: in memory, and in files where there is a folder. Each process
appends to a file of its own, and reads the files of all when it starts. So several processes, and
later runs, may share a folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.errors import DiskError
from spmd_rl.rewards.config import JudgeConfig, graders_of
from spmd_rl.rewards.deadline import uncounted
from spmd_rl.rewards.remote.http import HttpRequest, ServerError, as_json, ask, header_values
from spmd_rl.rewards.remote.judge_prompt import (
    REPAIR,
    Rubric,
    read_verdict,
    request_body,
    rubric_of,
    score,
)
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.hooks.context import HookContext


class Judged(msgspec.Struct, frozen=True):
    """A verdict on each criterion with its reason, and who gave it: the server's model and its
    fingerprint.
    """

    passed: list[bool]
    model: str
    fingerprint: str
    reasons: list[str] = []


class _Line(msgspec.Struct, frozen=True):
    key: str
    judged: Judged


class JudgeCache:
    """Verdicts by key, of which memory holds `max_entries` at most.

    Raises: DiskError when the folder cannot be used.
    """

    def __init__(self, folder: str, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[str, Judged] = OrderedDict()
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._file: int | None = None
        if folder:
            try:
                self._open(Path(folder))
            except OSError as error:
                raise DiskError(f"graders.judge.cache_folder {folder}: {error.strerror}") from error

    async def get(self, key: str, judge: Callable[[], Awaitable[Judged]]) -> tuple[Judged, bool]:
        """Return the verdict for a key, and whether it was known.

        Without one it is what `judge` returns, which is called once for all that ask meanwhile.
        """
        while (waiting := self._asked.get(key)) is not None:
            await asyncio.wait([waiting])
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key], True
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            judged = await judge()
            self._add(key, judged)
            self._write(_Line(key, judged))
        finally:
            del self._asked[key]
            asked.set_result(None)
        return judged, False

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        decoder = msgspec.json.Decoder(_Line)
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    known = decoder.decode(line)
                except msgspec.DecodeError:  # the last line of a process that was killed
                    continue
                self._add(known.key, known.judged)
        own = folder / f"{os.getpid()}-{secrets.token_hex(8)}.jsonl"
        self._file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def _add(self, key: str, judged: Judged) -> None:
        self._entries[key] = judged
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def _write(self, line: _Line) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise DiskError(f"graders.judge.cache_folder: {error.strerror}") from error


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Completion(msgspec.Struct, frozen=True):
    """What is read of a chat completion."""

    choices: list[_Choice]
    model: str = ""
    system_fingerprint: str | None = None


async def judge(ctx: HookContext, prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return the weighted share of criteria that a response passes, and each one as a part.

    The note "judge" names the model as its server calls it, its fingerprint, and a hash of the
    rubric; "judge: NAME" has the verdict on a criterion and its reason. `judge_cached` is emitted:
    1 if the verdict was known already, else 0.
    Raises: ServerError when there is no verdict that can be used, which fails the sample; DataError
    for a rubric of the record that cannot be used.
    """
    cfg = graders_of(ctx.config).judge
    rubric = rubric_of(cfg, prompt)
    body = request_body(cfg, rubric, prompt, sample)
    # weights and names are no part of it: they change the reward, and not the verdict
    key = hashlib.sha256(as_json([cfg.base_url, body])).hexdigest()
    verdicts = _cache(cfg.cache_folder, cfg.cache_entries)
    with uncounted():  # also where another call asks the same
        judged, was_known = await verdicts.get(key, lambda: _judged(cfg, rubric, body))
    ctx.emit("judge_cached", was_known)
    words = [judged.model or cfg.model, judged.fingerprint, f"rubric {rubric.digest}"]
    ctx.note("judge", " ".join(filter(None, words)))
    # a verdict of a folder may be of a time when reasons were not kept
    named = zip(rubric.criteria, judged.passed, judged.reasons, strict=False)
    for (name, *_), passes, reason in named:
        ctx.note(f"judge: {name}", f"{'passes' if passes else 'fails'}: {reason}")
    return score(judged.passed, rubric)


_cache = cache(JudgeCache)  # one in a process, by its settings


async def _judged(cfg: JudgeConfig, rubric: Rubric, body: dict[str, Any]) -> Judged:
    """Ask for a verdict, and once more if the first one is malformed."""
    messages, problem = body["messages"], ""
    for _ in range(2):
        completion = await _complete(cfg, body | {"messages": messages})
        text = completion.choices[0].message.content or ""
        try:
            verdicts = read_verdict(text, rubric)
        except ValueError as error:
            problem = str(error)
            repair = {"role": "user", "content": REPAIR.format(problem=problem)}
            messages = [*messages, {"role": "assistant", "content": text}, repair]
            continue
        passed, reasons = [one.passes for one in verdicts], [one.reason for one in verdicts]
        return Judged(passed, completion.model, completion.system_fingerprint or "", reasons)
    raise ServerError(f"the judge gave no verdict of the schema twice: {problem}")


async def _complete(cfg: JudgeConfig, body: dict[str, Any]) -> _Completion:
    variables = {"Authorization": cfg.key_from} if cfg.key_from else {}
    keys = header_values(variables, "graders.judge.key_from")
    headers = {name: f"Bearer {value}" for name, value in keys.items()}
    url = cfg.base_url.rstrip("/") + "/chat/completions"
    return await ask(HttpRequest(url, as_json(body), headers, cfg), _read_completion)


def _read_completion(answer: bytes) -> _Completion:
    """Return the completion in an answer. Raises: ValueError."""
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the answer is no chat completion ({error})") from error
    if not completion.choices:
        raise ValueError("the answer has no choice")
    return completion
