"""The batch script: bash and Slurm read back exactly what was given."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.errors import ConfigError
from spmd_rl.slurm.script import END, TEMPLATE, Job, directive, quote, render

ROOT = Path(__file__).parents[3]
JOB = Job(
    words=("recipe.py",),
    folder=Path("/shared/runs/one"),
    python="/venv/bin/python",
    nproc=8,
    max_restarts=3,
    options={"nodes": "2", "requeue": None},
)
WORDS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4
)


def read_back(job: Job) -> list[str]:
    """The values as bash has them once it has read the block that `render` fills in."""
    filled, _, _ = render(job).partition(END)
    script = filled + 'printf "%s\\0" "$python" "$folder" "$nproc" "$max_restarts" "$@"'
    done = subprocess.run(["bash", "-u"], input=script.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=40)
@given(words=WORDS)
@example(
    words=[
        "a b",
        "it's",
        '"q"',
        "$HOME `id` $(id)",
        "line\nline",
        "\r\n",
        "\\",
        "\\n",
        "-n",
        "--",
        "!",
        "#",
        "*",
        "",
    ]
)
@example(words=["x\n#SBATCH --nodes=99\n"])
def test_every_word_survives(words: list[str]) -> None:
    job = replace(JOB, words=tuple(words))
    assert read_back(job) == [job.python, str(job.folder), "8", "3", *words]
    assert render(job).count("\n#SBATCH --nodes") == 1
    assert "\r" not in render(job)


def test_an_unquoted_word_would_be_seen() -> None:
    script = f"set -- {'two words'}\nprintf '%s\\0' \"$@\""
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [b"two", b"words"]


def test_paths_with_spaces_survive() -> None:
    job = replace(JOB, folder=Path("/my runs/it's one"), python="/my venv/python", nproc=0)
    assert read_back(job) == [job.python, str(job.folder), "", "3", "recipe.py"]
    assert '#SBATCH --output="/my runs/it\'s one/logs/slurm_%j.log"\n' in render(job)


def test_slurm_reads_its_options_before_the_first_command() -> None:
    lines = render(JOB).splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(directives) < min(commands)
    assert [line for line in lines if line.startswith("#SBATCH")][-2:] == [
        "#SBATCH --nodes=2",
        "#SBATCH --requeue",
    ]


@pytest.mark.parametrize("value", ["a\nb", 'a"b', "a\\b", "a\x7fb"])
def test_what_slurm_cannot_read_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--partition="):
        directive("partition", value)


def test_a_folder_that_slurm_would_expand_is_refused() -> None:
    with pytest.raises(ConfigError, match="%"):
        render(replace(JOB, folder=Path("/shared/100%")))


def test_quoting_keeps_one_line() -> None:
    assert quote("plain") == "plain"
    assert "\n" not in quote("two\nlines")


def test_the_script_in_launch_is_the_one_in_the_package() -> None:
    launched = ROOT / "launch/slurm.sbatch"
    assert launched.read_text() == TEMPLATE.read_text()
