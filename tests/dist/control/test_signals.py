"""Signals at any moment of a run: one sentence, the documented exit code, and no wait."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.launched import Launched

pytestmark = pytest.mark.dist

Start = Callable[..., subprocess.Popen[str]]

AT_AN_IMPORT = """
import os, signal, sys
from dataclasses import dataclass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Finder())

@dataclass(frozen=True)
class Config: ...

def main(ctl, cfg): ...
"""
IN_THE_LAST_MOMENT = """
import os, signal
from dataclasses import dataclass

import spmd_rl as rl

@dataclass(frozen=True)
class Config: ...

class Late(rl.Role):
    @rl.collective
    def arm(self) -> None:
        import torch.distributed as dist

        leave = dist.destroy_process_group
        dist.destroy_process_group = lambda: (os.kill(os.getpid(), signal.SIGTERM), leave())

def main(ctl, cfg):
    ctl.spawn(Late, cfg, on=ctl.world.split({"late": rl.RoleSplit()}).late).arm.call()
"""

HUNG_UP = """
import os, signal, time
from dataclasses import dataclass

import spmd_rl as rl

@dataclass(frozen=True)
class Config: ...

class Terminal(rl.Role):
    @rl.collective
    def close(self) -> None:
        for _ in range(2):  # the kernel, and the shell
            os.killpg(os.getpgrp(), signal.SIGHUP)
        time.sleep(2)

def main(ctl, cfg):
    ctl.spawn(Terminal, cfg, on=ctl.world.split({"terminal": rl.RoleSplit()}).terminal).close.call()
"""


def ended(start: Start, spmd_rl: list[str], folder: Path, recipe: str) -> tuple[int, list[str]]:
    (folder / "signalled.py").write_text(recipe)
    process = start([*spmd_rl, "signalled.py", "--nproc=1"])
    _, err = process.communicate(timeout=600)
    return process.returncode, said(err)


def said(err: str) -> list[str]:
    """Return the lines on stderr, without those of a start that is slow."""
    return [line for line in err.splitlines() if not line.endswith(" ...")]


RENDEZVOUS = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("torch", signal.SIGHUP),
        ("torch", signal.SIGTERM),
        ("torch.distributed.fsdp", signal.SIGINT),
        (RENDEZVOUS, signal.SIGINT),
        (RENDEZVOUS, signal.SIGHUP),
    ],
)
def test_the_launcher_while_it_starts(
    start: Start, spmd_rl: list[str], tmp_path: Path, module: str, number: signal.Signals
) -> None:
    moment = "" if module == RENDEZVOUS else " before it began"
    recipe = AT_AN_IMPORT.format(module=module, number=number.name)
    code, err = ended(start, spmd_rl, tmp_path, recipe)
    if number == signal.SIGHUP and not moment:
        number = signal.SIGTERM  # the signal that the ranks get
    assert err == [f"the run was ended by {number.name}{moment}"]
    assert code == 128 + number
    assert not list(tmp_path.glob("spmd_rl-*")), "torchrun's logs"


@pytest.mark.parametrize(
    ("before", "code", "sentence"),
    [([], 143, ["the run was ended from outside: every rank got SIGTERM"]), (["nohup"], 0, [])],
)
def test_the_terminal_is_closed(
    start: Start,
    spmd_rl: list[str],
    tmp_path: Path,
    before: list[str],
    code: int,
    sentence: list[str],
) -> None:
    assert ended(start, [*before, *spmd_rl], tmp_path, HUNG_UP) == (code, sentence)


def test_a_rank_while_it_starts(start: Start, spmd_rl: list[str], tmp_path: Path) -> None:
    recipe = AT_AN_IMPORT.format(module="spmd_rl.controller.worker", number="SIGINT")
    assert ended(start, spmd_rl, tmp_path, recipe) == (1, ["rank 0 was killed by SIGINT"])


def test_a_rank_that_leaves_heeds_it(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """Otherwise torchrun, which sent the signal, waits for a rank that waits for torchrun."""
    (tmp_path / "signalled.py").write_text(IN_THE_LAST_MOMENT)
    process = launch("run", "signalled.py", "--nproc=1")
    _, err = process.communicate(timeout=600)
    assert (process.returncode, said(err)) == (1, ["rank 0 was killed by SIGTERM"])
