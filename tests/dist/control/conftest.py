"""Fixtures that start runs, each in a process group that ends with its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.forked_controller import forking
from tests.dist.launched import Launched, Main
from tests.dist.launched import spmd_rl as be_spmd_rl

REPO = Path(__file__).parents[3]
CHAOS = str(Path(__file__).with_name("chaos.py"))
SPMD_RL = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

Start = Callable[[list[str]], subprocess.Popen[str]]
Launch = Callable[..., Launched]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SPMD_RL", "TORCHELASTIC"))}
    return base | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Start a command in `tmp_path` that obeys SIGHUP; its process group ends with the test."""
    started: list[subprocess.Popen[str]] = []
    # the process that started these tests may ignore it
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def run(command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    signal.signal(signal.SIGHUP, inherited)
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def launch(tmp_path: Path, environment: dict[str, str]) -> Iterator[Launch]:
    """Start `spmd-rl` in `tmp_path`, forked from a process that has imported torch.

    Its controller is a new process, which has not, or is forked by `main=forking`. Runs that go on
    at once have folders of their own, `beside` each other. All process groups end with the test.
    """
    launched: list[Launched] = []

    def run(*words: str, main: Main = be_spmd_rl, beside: str = "") -> Launched:
        folder = tmp_path / beside
        folder.mkdir(exist_ok=True)
        launched.append(Launched(list(words), folder, environment | {"TMPDIR": str(folder)}, main))
        return launched[-1]

    yield run
    for process in launched:
        process.end()


@pytest.fixture
def chaos(launch: Launch) -> Launch:
    """Start the chaos recipe by `spmd-rl run` on two ranks.

    Scenarios that end well see that the controller does without torch.
    """

    def run(scenario: str, *words: str, beside: str = "") -> Launched:
        main = be_spmd_rl if scenario in ("fine", "once") else forking
        words = ("run", CHAOS, "--nproc=2", f"--scenario={scenario}", *words)
        return launch(*words, main=main, beside=beside)

    return run


@pytest.fixture
def repo() -> Path:
    return REPO


@pytest.fixture
def spmd_rl() -> list[str]:
    return SPMD_RL


@pytest.fixture
def torchrun() -> list[str]:
    """Return the command that runs the chaos recipe under torchrun itself."""
    return [*TORCHRUN, "-m", "spmd_rl", "run", CHAOS]


@pytest.fixture
def spmd_rl_with_heartbeats() -> list[str]:
    """Return the command for a launcher whose rendezvous is released by its heartbeat's thread."""
    return [sys.executable, str(Path(__file__).with_name("heartbeat.py")), "run", CHAOS]


@pytest.fixture
def torchrun_with_two_secrets(tmp_path: Path) -> list[str]:
    """Return the same command, where rank 1 holds a secret of its own."""
    entry = tmp_path / "stranger.py"
    entry.write_text(
        "import os, sys\n"
        "os.environ['SPMD_RL_SECRET'] = ('ab' if os.environ['RANK'] == '1' else 'cd') * 32\n"
        "from spmd_rl.cli.rank import rank_main\n"
        "sys.exit(rank_main())\n"
    )
    return [*TORCHRUN, str(entry), "run", CHAOS]
