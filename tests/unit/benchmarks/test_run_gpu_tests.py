"""Runs of tests/gpu: which files share a GPU, and a run that goes on where the last one ended."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from benchmarks import run_gpu_tests
from benchmarks.run_gpu_tests import NUM_GPUS, ROOT, TESTS, UNFINISHED, GpuFile, Host


def test_files_share_the_workers_of_a_gpu_and_who_wants_to_be_alone_waits() -> None:
    host = Host(["0", "1"], workers=4)
    shared = [GpuFile(f"train/{index}.py") for index in range(4)]
    kernels = GpuFile("kernels/rows.py")
    assert kernels.workers == 4 and shared[0].workers == 1
    assert host.place(kernels) == ["0"]
    assert [host.place(file) for file in shared] == [["1"]] * 4
    more, both = GpuFile("train/more.py"), GpuFile("train/both.py", num_gpus=2)
    assert host.place(more) == [] == host.place(both)
    host.leave(kernels)
    host.leave(shared[0])
    assert host.place(both) == ["0", "1"]
    alone = GpuFile("train/more.py", alone=True)
    assert host.place(alone) == []
    for file in (both, *shared):
        host.leave(file)
    assert host.place(alone) == ["0"]
    assert host.place(both) == []
    assert host.place(more) == ["1"]
    host.leave(more)
    assert host.place(GpuFile("train/all.py", num_gpus=4)) == []
    host.leave(alone)
    assert host.place(GpuFile("train/all.py", num_gpus=4)) == ["0", "1"]


def test_a_file_of_more_workers_than_there_are_gets_an_idle_gpu() -> None:
    host = Host(["0"], workers=2)
    assert host.place(GpuFile("kernels/rows.py")) == ["0"]
    assert host.place(GpuFile("train/loss.py")) == []


def texts(*parts: str) -> set[str]:
    """Files below tests/gpu that say one of `parts`, by a name that they import or a call."""
    root = ROOT / TESTS
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("test_*.py")
        if any(part in path.read_text() for part in parts)
    }


READS_MEMORY = ("mem_get_info", "free_bytes", "usage")
TOLERANT = {  # the median of several times, or what does not depend on others
    *("test_graphs_outlive_a_sleep", "test_more_than_there_is_cannot_be_allocated"),
    *("test_memory_comes_back_and_greedy_tokens_are_the_same", "test_activations_leave_the_gpu"),
}


def test_tests_that_read_the_free_memory_of_a_gpu_are_alone() -> None:
    """By the function's own text: helpers that read it are named in `READS_MEMORY`."""
    reading = set()
    for path in (ROOT / TESTS).rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                names |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
                marks = [ast.unparse(one) for one in node.decorator_list]
                if names & set(READS_MEMORY) and "pytest.mark.alone" not in marks:
                    reading.add(node.name)
    assert reading == TOLERANT


def test_files_that_start_several_ranks_get_several_gpus() -> None:
    assert texts("torchrun(", "--nproc=2") == set(NUM_GPUS)


def test_all_files_are_chosen_but_for_what_is_named() -> None:
    entries = run_gpu_tests.files_of([TESTS])
    everything = {file.name for file in entries}
    assert everything == texts("")
    alone = [file.name for file in entries if file.alone]
    assert len(alone) > 5 and set(alone) == texts("pytest.mark.alone")
    assert alone == [file.name for file in entries[-len(alone) :]], "they come last"
    train = [file.name for file in run_gpu_tests.files_of([f"{TESTS}/train"])]
    assert set(train) == {name for name in everything if name.startswith("train/")}
    assert train.index("train/test_megatron.py") < train.index("train/test_frozen.py"), "longer"
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
    assert code == 0 and lines[0].startswith("train.test_right: 1 passed in ")
    code, lines = run(*quick)
    assert code == 1 and lines[0].startswith("train.test_wrong: 1 failed in ")
    assert lines[1:] == [
        "FAILED tests/gpu/train/test_wrong.py::test_two - assert 1 == 2",
        f"1 passed, 0 skipped, 1 failed in 2 of 2 files; the reports are {out}/*.xml",
    ]
    code, lines = run("--limit-s", "1")
    assert code == 1 and lines[0] == f"train.test_slow: {UNFINISHED}"
    assert lines[-1].endswith(" in 2 of 3 files; run this again for train.test_slow")
    (folder / "test_slow.py").write_text("def test_slow(): pass")
    assert run()[1][0].startswith("train.test_slow: 1 passed in ")


def test_a_place_without_tests_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_gpu_tests", str(tmp_path / "out"), "tests/gpu/trian"])
    with pytest.raises(SystemExit):
        run_gpu_tests.main()
    sentence = "no file of tests is at tests/gpu/trian: name some of tests/gpu"
    assert sentence in capsys.readouterr().err
