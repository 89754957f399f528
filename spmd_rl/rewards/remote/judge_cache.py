"""Verdicts of a judge by what it was asked: in memory, and in files where there is a folder.

Each process appends to a file of its own, and reads the files of all when it starts. So several
processes, and later runs, may share a folder.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from spmd_rl.errors import DiskError


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
