"""Environments of clients and servers that nobody here wrote, each of which is made once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALL_S = 1200  # for pip


def environment(name: str, *pip: Sequence[str]) -> str:
    """Return Python of an environment below `build/`, into which pip has installed a list of ours.

    SPMD_RL_NAME names another folder for it. Each of `pip` is what one call of pip gets besides.
    """
    folder = Path(os.environ.get(f"SPMD_RL_{name.upper()}", ROOT / "build" / name))
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    pins = (HERE / f"{name}.txt").read_text()
    if not stamp.is_file() or stamp.read_text() != pins:
        install = [str(python), "-m", "pip", "install", "-q"]
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands += [[*install, *words] for words in pip]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
            if done.returncode:
                pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
        stamp.write_text(pins)
    return str(python)


@pytest.fixture(scope="session")
def clients() -> str:
    """Python of the clients' environment."""
    return environment("clients", ["-r", str(HERE / "clients.txt")])


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of nltk's data with five words. nltk keeps the first folder that it has read from."""
    folder = tmp_path_factory.mktemp("nltk")
    for name in ("en", "en-basic"):
        path = folder / "corpora" / "words" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("aaaaaa\nbbbbbb\nabbbba\nbaaaab\naabbaa\n")
    return folder


@pytest.fixture
def five_words(words_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of words know five words alone, here and in child processes."""
    nltk = pytest.importorskip("nltk")
    monkeypatch.setenv("NLTK_DATA", str(words_folder))
    monkeypatch.setattr(nltk.data, "path", [str(words_folder)])


@pytest.fixture(scope="session")
def openenv() -> str:
    """Python of an environment with OpenEnv's server."""
    packages = ["-r", str(HERE / "openenv.txt")]
    # gradio is 300 MB, and only the server's web page needs it
    return environment("openenv", packages, ["--no-deps", "openenv-core==0.3.0"])


@pytest.fixture(scope="session")
def echo_server(openenv: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server that `openenv init` writes, as it is: it echoes, in one place."""
    with echo(openenv, tmp_path_factory.mktemp("openenv")) as address:
        yield address


@pytest.fixture
def roomy_server(openenv: str, tmp_path: Path) -> Iterator[str]:
    """Address of the same server with 64 places."""
    with echo(openenv, tmp_path, num_places=64) as address:
        yield address


@contextmanager
def echo(python: str, folder: Path, num_places: int = 1) -> Iterator[str]:
    """Start the server that `openenv init` writes, with so many places."""
    python_alone = [python, "-E"]  # without the PYTHONPATH of these tests
    init = [*python_alone, "-m", "openenv.cli", "init", "my_echo"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=INSTALL_S)
    app = folder / "my_echo/server/app.py"
    text, written = app.read_text(), "max_concurrent_envs=1,"
    assert written in text
    app.write_text(text.replace(written, f"max_concurrent_envs={num_places},"))
    serve = [*python_alone, "-m", "uvicorn", "my_echo.server.app:app", "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(serve, cwd=folder, text=True, **pipes) as server:
        try:
            assert server.stderr is not None
            told = ""
            while not (found := re.search(r"running on (http://\S+)", told)):
                line = server.stderr.readline()
                assert line, told
                told += line
            # a full pipe would stop the server
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield found[1]
        finally:
            server.kill()
