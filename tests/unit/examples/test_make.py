"""`make demo` keeps what an earlier demo left. Nothing is installed: the stamp is newer than what
it depends on.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.laws.source import ROOT

FAKE = "#!/bin/sh\nmkdir -p runs/demo && echo new > runs/demo/metrics.jsonl\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    command = tmp_path / ".venv/bin/spmd-rl"
    command.parent.mkdir(parents=True)
    command.write_text(FAKE)
    command.chmod(0o755)
    (tmp_path / ".venv/.demo").touch()
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_an_earlier_demo_is_moved_aside(checkout: Path) -> None:
    def demo() -> str:
        return subprocess.check_output(["make", "demo"], cwd=checkout, text=True)

    assert "is now" not in demo()
    (checkout / "runs/demo/metrics.jsonl").write_text("old\n")
    assert "the earlier runs/demo is now runs/demo-" in demo()
    (aside,) = checkout.glob("runs/demo-*")
    assert (aside / "metrics.jsonl").read_text() == "old\n"
    assert (checkout / "runs/demo/metrics.jsonl").read_text() == "new\n"
