"""Runs of tests/gpu: which files share a GPU, and a run that goes on where the last one ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import run_gpu_tests
from benchmarks.run_gpu_tests import NEEDS, ROOT, SEATS, TESTS, UNFINISHED, GpuFile, Host, Needs


def a_file(name: str, needs: Needs = Needs()) -> GpuFile:  # noqa: B008 - it cannot be changed
    return GpuFile(f"{name}.py", needs, 1.0)


def test_files_take_seats_and_who_wants_to_be_alone_waits() -> None:
    host = Host(["0", "1"])
    shared = [a_file(f"shared_{index}") for index in range(2 * SEATS + 1)]
    assert [host.place(file) for file in shared] == [["0"], ["1"]] * SEATS + [[]]
    alone, both = a_file("alone", Needs(alone=True)), a_file("both", Needs(2))
    assert host.place(alone) == []
    assert host.place(both) == ["0", "1"]
    for file in (*shared[::2], both):
        host.leave(file)
    assert host.place(alone) == ["0"]
    assert host.place(shared[0]) == [] == host.place(both)
    host.leave(alone)
    assert host.place(a_file("all", Needs(4, alone=True))) == []
    for file in shared:
        host.leave(file)
    assert host.place(a_file("all", Needs(4, alone=True))) == ["0", "1"]


def texts(*parts: str) -> set[str]:
    """Files below tests/gpu that say one of `parts`, by a name that they import or a call."""
    root = ROOT / TESTS
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("test_*.py")
        if any(part in path.read_text() for part in parts)
    }


def test_files_that_read_the_free_memory_of_a_gpu_are_alone() -> None:
    alone = {name for name, needs in NEEDS.items() if needs.alone}
    reading = texts("mem_get_info", "free_bytes", "make_role")
    assert len(reading) > 5 and reading <= alone
    assert all((ROOT / TESTS / name).exists() for name in NEEDS)


def test_files_that_start_several_ranks_get_several_gpus() -> None:
    starting = texts("torchrun(", "--nproc=2")
    assert starting == {name for name, needs in NEEDS.items() if needs.num_gpus > 1}


def test_all_files_are_chosen_but_for_what_is_named() -> None:
    everything = {file.name for file in run_gpu_tests.files_of([TESTS])}
    assert everything == texts("")
    train = [file.name for file in run_gpu_tests.files_of([f"{TESTS}/train"])]
    assert set(train) == {name for name in everything if name.startswith("train/")}
    assert train.index("train/test_sleep.py") < train.index("train/test_frozen.py")
    assert [file.name for file in run_gpu_tests.files_of([f"{TESTS}/{train[0]}"])] == train[:1]


SLOW = """
import threading

def test_slow():
    threading.Event().wait()
"""


def test_a_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / TESTS / "train"
    folder.mkdir(parents=True)
    (folder / "test_right.py").write_text(
        "import os\ndef test_one(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '7'"
    )
    (folder / "test_wrong.py").write_text("def test_two(): assert 1 == 2")
    (folder / "test_slow.py").write_text(SLOW)
    monkeypatch.setattr(run_gpu_tests, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    out = tmp_path / "out"
    quick = ["tests/gpu/train/test_right.py", "tests/gpu/train/test_wrong.py"]

    def run(*words: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["run_gpu_tests", str(out), *words])
        return run_gpu_tests.main(), capsys.readouterr().out.splitlines()

    code, lines = run(quick[0])
    assert code == 0 and lines[0].startswith("train/test_right.py: 1 passed in ")
    code, lines = run(*quick)
    assert code == 1 and lines[0].startswith("train/test_wrong.py: 1 failed in ")
    assert lines[1:] == [
        "FAILED tests/gpu/train/test_wrong.py::test_two - assert 1 == 2",
        f"1 passed, 0 skipped, 1 failed in 2 of 2 files; the reports are {out}/*.xml",
    ]
    code, lines = run("--limit-s", "1")
    assert code == 1 and lines[0] == f"train/test_slow.py: {UNFINISHED}"
    assert lines[-1].endswith(" in 2 of 3 files; run this again for train/test_slow.py")
    (folder / "test_slow.py").write_text("def test_slow(): pass")
    assert run()[1][0].startswith("train/test_slow.py: 1 passed in ")


def test_a_place_without_tests_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_gpu_tests", str(tmp_path / "out"), "tests/gpu/trian"])
    with pytest.raises(SystemExit):
        run_gpu_tests.main()
    sentence = "no file of tests is at tests/gpu/trian: name some of tests/gpu"
    assert sentence in capsys.readouterr().err
