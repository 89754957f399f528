"""Attack by another user of the host, who knows every open port of a run: it gains nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.dist.control.conftest import Launch, Start
from tests.dist.launched import Launched
from tests.listeners import open_ports

pytestmark = pytest.mark.dist

ATTACKER = str(Path(__file__).with_name("attacker.py"))
NUM_ATTEMPTS = 5  # a busy machine makes few while the run lasts


class Attacker:
    """A process that attacks given ports, as another user if the tests run as root."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, ATTACKER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._answer() == "ready"

    def attack(self, ports: set[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(sorted(ports)), file=self._process.stdin, flush=True)
        return dict(self._answer())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    # the folder of pytest belongs to this user alone
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        attacker = Attacker(Path(folder))
        yield attacker
        attacker.end()


def attack_until_the_end(
    attacker: Attacker, process: Launched | subprocess.Popen[str]
) -> list[dict[str, Any]]:
    """Attack all open ports again and again until the run ends."""
    attempts = []
    while running(process):
        attempts.append(attacker.attack(open_ports(process.pid)))
    return attempts


def running(process: Launched | subprocess.Popen[str]) -> bool:
    return (process.poll() if isinstance(process, subprocess.Popen) else process.returncode) is None


def test_the_attack_finds_an_open_store(attacker: Attacker) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = open_ports(os.getpid())
    assert store.port in ports
    assert store.port in attacker.attack({store.port})["taken"]


def test_a_run_of_one_machine_opens_no_store(attacker: Attacker, chaos: Launch) -> None:
    """Neither in its first start nor in another."""
    process = chaos("once", "--max-restarts=1")
    attempts = attack_until_the_end(attacker, process)
    out, err = process.communicate(60)
    assert process.returncode == 0, err
    assert "all fine" in out
    assert len(attempts) >= NUM_ATTEMPTS
    assert all(attempt == {"taken": [], "dialled": 0} for attempt in attempts)


def test_a_lie_in_torchruns_own_store_is_not_believed(
    attacker: Attacker, start: Start, torchrun: list[str]
) -> None:
    process = start([*torchrun, "--scenario=fine"])
    attempts = attack_until_the_end(attacker, process)
    out, err = process.communicate(60)
    assert process.returncode == 0, err
    assert "all fine" in out
    assert any(attempt["taken"] for attempt in attempts), "torchrun keeps its store open to all"
    assert not any(attempt["dialled"] for attempt in attempts)
