"""The environment of clients that nobody here wrote, which is made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALL_S = 1200  # for pip


@pytest.fixture(scope="session")
def clients() -> str:
    """Python of the clients' environment, which is made once, below `build/`.

    SPMD_RL_CLIENTS names another folder for it.
    """
    folder = Path(os.environ.get("SPMD_RL_CLIENTS", ROOT / "build" / "clients"))
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    pins = (HERE / "clients.txt").read_text()
    if not stamp.is_file() or stamp.read_text() != pins:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "-r", str(HERE / "clients.txt")],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
            if done.returncode:
                pytest.skip(f"the clients cannot be installed: {done.stderr.strip()[-300:]}")
        stamp.write_text(pins)
    return str(python)
