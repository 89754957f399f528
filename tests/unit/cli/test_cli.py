"""Answers of `spmd-rl` itself: help, the version, mistyped commands, readers that have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import spmd_rl
from spmd_rl.cli import command
from spmd_rl.cli.exit_code import SPIN_COUNT, run_guarded
from spmd_rl.cli.help import COMMANDS
from spmd_rl.cli.main import dispatch, main
from spmd_rl.cli.rank import is_process_of_a_run
from spmd_rl.controller.lifecycle.exit_message import ERROR_FILE_ENV
from tests.laws.source import ROOT

TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR")
MAIN = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"


def ended(*words: str) -> int:
    """Return the exit code of `spmd-rl` with these words."""
    try:
        return run_guarded(dispatch, list(words))
    except SystemExit as leaving:  # help of an argument parser
        return int(leaving.code or 0)


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Help goes to stdout, whatever the other words are."""
    for words in ([flag], ["grpo", flag], ["grpo", "--out", flag]):
        assert ended(command, *words) == 0
        out, err = capfd.readouterr()
        assert out.startswith(f"usage: spmd-rl {command}")
        assert err == ""


def test_the_overview_has_every_command_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    out, err = capfd.readouterr()
    assert err == ""
    for name, entry in COMMANDS.items():
        assert any(
            line.split()[:1] == [name] and line.endswith(entry.summary) for line in out.splitlines()
        )
    assert ended() == 2
    assert capfd.readouterr() == ("", out)


@pytest.mark.parametrize(
    "words", [["run"], ["run", "--help"], ["run", "--nproc=2", "grpo", "--help"]]
)
def test_help_of_run_names_the_recipes(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    asked = "--help" in words
    assert ended(*words) == (0 if asked else 2)
    out, err = capfd.readouterr()
    said, nothing = (out, err) if asked else (err, out)
    assert nothing == ""
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "synchronous and on-policy" in lines["grpo"]
    assert "one step ahead" in lines["grpo_async"]
    assert "Supervised fine-tuning" in lines["sft"]
    assert not {"recorder", "inputs"} & set(lines), "these are no recipes"
    assert {"--config", "--nproc", "--max-restarts", "--verbose"} <= set(lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--steps", "3"],
            "there is no recipe '3': shipped ones are collect, distill, dpo, evaluate, grpo, "
            "grpo_async, grpo_fully_async, pretrain, rejection_sampling, replay, reward_model, "
            "rlhf, sft (a path must end in .py)",
        ),
        (["--steps=3"], "spmd-rl run: the following arguments are required: recipe"),
        (["--nproc", "2"], "spmd-rl run: the following arguments are required: recipe"),
        (
            ["--nproc", "2", "gpro"],
            "there is no recipe 'gpro': did you mean grpo? (a path must end in .py)",
        ),
        (["--verbose", "./missing.py"], "there is no recipe at ./missing.py"),
    ],
)
def test_a_forgotten_or_mistyped_recipe(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended("run", *words) == 2
    assert capfd.readouterr() == ("", f"{said}\n")


def test_a_sentence_is_told_though_a_torchrun_around_is_gone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_FILE_ENV, "/nonexistent/error.json")
    monkeypatch.setattr(sys, "argv", ["spmd-rl", "run", "gpro"])
    assert main() == 2
    assert "there is no recipe 'gpro'" in capfd.readouterr().err


def test_settings_may_come_before_the_recipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("run", "--nproc=2", "sft") == 2
    assert "model is required" in capfd.readouterr().err


def test_no_ranks_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("run", "sft", "--nproc", "0") == 2
    assert capfd.readouterr().err == "--nproc=0: expected 1 or more\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["frobnicate"], "spmd-rl has no command 'frobnicate': there are run, plan, submit, "),
        (
            ["frobnicate", "--help"],
            "spmd-rl has no command 'frobnicate': there are run, plan, submit, ",
        ),
        (["reprot", "runs/r"], "spmd-rl has no command 'reprot': did you mean report?"),
        (["--steps=3"], "spmd-rl has no command '--steps=3': there are run, plan, "),
    ],
)
def test_an_unknown_command(
    words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words) == 2
    out, err = capfd.readouterr()
    assert err.startswith(sentence)
    assert (out, err.count("\n")) == ("", 1)


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capfd.readouterr() == (f"spmd-rl {spmd_rl.__version__}\n", "")


@pytest.mark.parametrize("words", ["--version", "run sft --help", "plan --help", "stacks --help"])
def test_a_reader_who_has_gone(words: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        command = [sys.executable, "-c", MAIN, *words.split()]
        env = os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run(
            command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False, env=env
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_pipe_that_breaks_elsewhere_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(words: list[str]) -> int:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(command, "launch_run", broken)
    assert ended("run", "sft") == 1
    assert "of a socket" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, SPIN_COUNT), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_give_their_core_away(given: dict[str, str], spins: str | None) -> None:
    """The variable must be set before torch is loaded, which reads it once."""
    code = (
        "import os, sys; from spmd_rl.cli.exit_code import run_guarded;"
        "run_guarded(lambda words: 0, []);"
        "assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(spins)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, f"spmd-rl {spmd_rl.__version__}"),
        (["run", "grpo"], 2, "model is required: say --model VALUE"),
        (["plan", "grpo", "--world=4"], 2, "model is required: say --model VALUE"),
        (["run", "grpo", "--help"], 0, "usage: spmd-rl run RECIPE"),
    ],
)
def test_the_module_is_the_program_outside_of_torchrun(
    words: list[str], code: int, said: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    ended = subprocess.run(
        [sys.executable, "-m", "spmd_rl", *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == code
    assert (ended.stdout + ended.stderr).startswith(said)


def test_the_module_is_a_rank_or_the_controller_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert is_process_of_a_run(["controller", "3", "folder", "address", "grpo"])
    assert not is_process_of_a_run(["run", "grpo"])
    monkeypatch.setenv("RANK", "0")  # as clusters set it that start no torchrun
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert not is_process_of_a_run(["run", "grpo"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_process_of_a_run(["run", "grpo"])
    assert is_process_of_a_run(["check"])
    assert not is_process_of_a_run(["report", "runs/a"])
