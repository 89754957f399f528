"""Interpreter and environment of a program that runs beside a rank with packages of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import ConfigError


@dataclass(frozen=True)
class Interpreter:
    """The command that starts Python for the child, and the PYTHONPATH that it gets."""

    command: str
    search_path: str

    @classmethod
    def of(cls, python: str) -> Interpreter:
        """Return the interpreter that `python` names; a folder is searched by our own.

        An interpreter of its own gets no PYTHONPATH, which would put our packages before its own.
        Raises: ConfigError when it names neither.
        """
        if not python:
            return cls(sys.executable, os.environ.get("PYTHONPATH", ""))
        path = Path(python)
        if path.is_dir():
            rest = os.environ.get("PYTHONPATH")
            folders = [*_folders(path.resolve()), *([rest] if rest else [])]
            return cls(sys.executable, os.pathsep.join(folders))
        if path.is_file() and os.access(path, os.X_OK):
            return cls(os.path.abspath(path), "")
        raise ConfigError(
            f"{python!r} is neither an interpreter nor a folder of packages: name "
            "the Python of an environment with SGLang, or a folder that SGLang was installed into"
        )


def meeting_environment(store: Path) -> dict[str, str]:
    """Return the variables by which SGLang's processes of one host meet in the file `store`.

    A store that listens would serve every user of the host and of its network. gloo listens on the
    loopback interface.
    """
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{store.absolute()}",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _folders(site: Path) -> Iterator[str]:
    """Yield a folder of packages, and the folders that its .pth files name.

    Python itself reads such files in its own site-packages alone.
    """
    yield str(site)
    for file in sorted(site.glob("*.pth")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith(("#", "import")) and (site / line).is_dir():
                yield str(site / line)
