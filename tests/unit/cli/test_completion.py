"""What a shell proposes for a command line of `spmd-rl`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from spmd_rl.cli.completion.command import main
from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.help import COMMANDS
from spmd_rl.controller.run.recipe import shipped_recipes

ASK = """
compopt() { printf '%s ' "$*"; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_spmd_rl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash(capfd: pytest.CaptureFixture[str]) -> str:
    assert main(["bash"]) == 0
    return capfd.readouterr().out + ASK


def proposed(bash: str, *words: str) -> list[str]:
    """Return what bash proposes for the last of the words of a command line."""
    command = ["bash", "-c", bash, "bash", "spmd-rl", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_recipes_and_settings(bash: str) -> None:
    assert proposed(bash, "") == [*COMMANDS]
    assert proposed(bash, "re") == ["report", "rewind"]
    for command in ("run", "plan", "submit", "check"):
        assert proposed(bash, command, "") == shipped_recipes()
    assert proposed(bash, "run", "grpo_f") == ["grpo_fully_async"]
    nospace = ["-o", "nospace"]
    assert proposed(bash, "run", "grpo", "--trainer.lr") == [*nospace, "--trainer.lr="]
    assert proposed(bash, "run", "sft", "--sampling") == []
    assert proposed(bash, "eval", "--checkp") == [*nospace, "--checkpoint="]
    assert proposed(bash, "run", "mine.py", "--") == []
    assert not any("NAME" in word for word in proposed(bash, "run", "grpo", "--"))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_read_its_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    script = capfd.readouterr().out
    assert "_spmd_rl spmd-rl" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_another_shell_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(main, ["zhs"]) == 2
    said = "spmd-rl completion zhs: expected bash or zsh; did you mean zsh?\n"
    assert capfd.readouterr() == ("", said)
