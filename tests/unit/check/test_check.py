"""`spmd-rl check`: its output, its child processes, and its exit code."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from spmd_rl.check import clocks, facts, probe
from spmd_rl.check.command import main
from spmd_rl.check.facts import ClockSkew, Gpus, TrialResult
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World


@pytest.fixture(autouse=True)
def outside_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_JOB_ID", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)


def child(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have probes run this shell script instead of themselves."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_it_prints_a_line_a_finding_and_fails_with_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "gpus", lambda version: Gpus(2, "580.1", "13.0", ("H200", "H200")))
    monkeypatch.setattr(
        probe, "run_trial", lambda what: TrialResult(what == "ipc", f"tried {what}")
    )
    assert main([f"--run.folder={tmp_path}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert any(line.startswith("fail  nccl") and "tried nccl" in line for line in lines)
    assert any(line.startswith("ok    ipc") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_without_failures_it_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gpus", lambda version: Gpus(0, "", None))
    monkeypatch.setattr(facts, "system_limits", lambda: facts.SystemLimits(65536, None, 1 << 34, 0))
    assert main([f"--run.folder={tmp_path}"]) == 0


def test_it_knows_no_other_words() -> None:
    with pytest.raises(ConfigError, match="--a"):
        main(["--a.b=c"])


def test_a_trial_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, "exec sleep 30")
    assert probe.run_trial("nccl", within_s=0.2) == TrialResult(False, "no result within 0.2 s")


def test_a_trial_that_crashes_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, "kill -SEGV $$")
    assert probe.run_trial("nccl") == TrialResult(False, "ended with exit code -11")


def test_a_trial_that_complains_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, "echo Traceback >&2; echo 'RuntimeError: no' >&2; exit 1")
    assert probe.run_trial("ipc") == TrialResult(False, "RuntimeError: no")


def test_gpus_are_as_the_child_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"cuda": "13.0", "names": ["H200", "H200"], "no_peer_access": [[0, 1]], "error": ""}
    child(tmp_path, monkeypatch, f"echo '{json.dumps(told)}'")
    monkeypatch.setattr(probe, "nvidia_devices", lambda: 2)
    found = probe.gpus("2.13.0")
    assert found == Gpus(2, found.driver, "13.0", ("H200", "H200"), ((0, 1),))
    child(tmp_path, monkeypatch, "exit 1")
    assert probe.gpus("2.13.0+cpu").cuda is None
    assert probe.gpus("2.13.0").error == "ended with exit code 1"


def test_clocks_are_compared_pairwise() -> None:
    assert clocks.spread([10.0, 9.5, 12.0]) == ClockSkew(2.5, "rank 1 to rank 2 of 3")


def test_ranks_meet_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    store, skews = HashStore(), {}
    monkeypatch.setattr(clocks, "open_store", lambda _: store)

    def rank(number: int) -> None:
        world = World(
            rank=number, size=3, local_rank=number, local_size=3, node=0, run_id="x", restart=0
        )
        skews[number] = clocks.rank_skew(world)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(skews) == 3
    assert len(set(skews.values())) == 1
    assert skews[0].seconds < 1.0
