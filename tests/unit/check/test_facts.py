"""The facts of this very host, and those of hosts that misbehave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from spmd_rl.check import facts


def test_a_good_folder_passes_and_keeps_nothing(tmp_path: Path) -> None:
    found = facts.runs_folder(tmp_path / "not/yet/there")
    assert found.path == tmp_path
    assert (found.error, found.renames, found.keeps_modes) == ("", True, True)
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_says_why() -> None:
    assert facts.runs_folder(Path("/proc/runs")).error


def test_a_rename_that_copies_nothing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda old, new: None)
    assert not facts.runs_folder(tmp_path).renames


def test_a_file_system_without_modes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, mode=0o777, **rest: really(path, flags, 0o644, **rest)
    )
    assert not facts.runs_folder(tmp_path).keeps_modes


def test_this_clock_agrees_with_its_own_files(tmp_path: Path) -> None:
    skew = facts.file_skew(tmp_path / "runs")
    assert skew.seconds < 10.0
    assert str(tmp_path) in skew.against


@pytest.mark.parametrize("offset_s", [-100.0, 100.0])
def test_a_clock_that_is_off_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() + offset_s)
    assert facts.file_skew(tmp_path).seconds == pytest.approx(100.0, abs=20.0)


def test_loopback_works_here() -> None:
    assert facts.network().loopback_error == ""


def test_the_drivers_version_is_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(facts, "DRIVER", version)
    assert facts.nvidia_driver() == ""
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC 12.3.0\n"
    )
    assert facts.nvidia_driver() == "580.159.04"


def test_limits_are_read() -> None:
    assert facts.system_limits().nofile > 0
