"""Programs in the sandbox, for its tests: a mark by which their processes are found, and a skip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.rewards.code.sandbox import Outcome, check_sandbox, run_in_sandbox
from spmd_rl.rewards.code.sandbox_command import FOLDER, program_command
from spmd_rl.rewards.config import CodeConfig


def missing() -> str:
    """Why there can be no sandbox here; "" where there can."""
    try:
        check_sandbox(CodeConfig())
    except ConfigError as error:
        return str(error)
    return ""


MISSING = missing()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class Marked:
    """Settings under which each process of a program has a mark in its command line."""

    def __init__(self, **settings: Any) -> None:
        self.mark = f"mark={uuid4().hex}"
        folders = tuple(dict.fromkeys((sys.prefix, sys.base_prefix)))
        command = (sys.executable, "-X", self.mark)
        self.settings = {"command": command, "read_only": folders, **settings}
        self.cfg = CodeConfig(**self.settings)

    def run(self, program: str, stdin: bytes = b"", seconds: float = 60.0) -> Outcome:
        command = [*program_command(self.cfg), f"{FOLDER}/program.py"]
        files = {"program.py": program.encode()}
        return run_in_sandbox(self.cfg, command, files, stdin, seconds)

    def processes(self) -> list[int]:
        """The processes of programs that run now, bubblewrap's included."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._has_mark(path)]

    def _has_mark(self, path: Path) -> bool:
        try:
            return self.mark.encode() in (path / "cmdline").read_bytes()
        except OSError:  # it has ended
            return False
