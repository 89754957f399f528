"""Batch script of a run: `job.sbatch` with its settings filled in. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from spmd_rl.errors import ConfigError

TEMPLATE = files("spmd_rl.slurm").joinpath("job.sbatch")
BEGIN, END = "# >>> spmd-rl submit\n", "# <<< spmd-rl submit\n"

_PLAIN = re.compile(r"[\w@%+=:,./*\[\]^&|()-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Job:
    """A run as a Slurm job. `options` are those of sbatch; None marks one without a value."""

    words: tuple[str, ...]  # arguments of `spmd-rl run`
    folder: Path  # of the run, absolute
    python: str
    nproc: int  # ranks on each node; 0 means one a GPU, or one without GPUs
    max_restarts: int  # of all ranks, within one attempt of the job
    options: dict[str, str | None]
    note: str = ""  # what the job will find in the run's folder


def render(job: Job) -> str:
    """Return the script. Raises: ConfigError for a value that Slurm cannot read."""
    above, _, below = TEMPLATE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, body = below.partition(END)
    block = [directive(name, value) for name, value in _options(job).items()]
    block += [
        f"python={quote(job.python)}",
        f"folder={quote(str(job.folder))}",
        f"nproc={job.nproc or ''}",
        f"max_restarts={job.max_restarts}",
        f"set -- {' '.join(map(quote, job.words))}",
    ]
    return above + BEGIN + "\n".join(block) + "\n" + END + body


def log_path(job: Job) -> str:
    """Return the file of the job's own output, as a pattern for Slurm."""
    return f"{job.folder}/logs/slurm_%j.log"


def directive(name: str, value: str | None) -> str:
    """Return one `#SBATCH` line. Raises: ConfigError for a value that Slurm cannot read."""
    if value is None:
        return f"#SBATCH --{name}"
    if _CONTROL.search(value) or '"' in value or "\\" in value:
        raise ConfigError(
            f"--{name}={value!r}: remove quotes, backslashes and control characters, "
            "which Slurm cannot read"
        )
    return f"#SBATCH --{name}={value}" if _PLAIN.fullmatch(value) else f'#SBATCH --{name}="{value}"'


def quote(word: str) -> str:
    """Return `word` quoted for bash, on one line."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", escaped) + "'"


def _options(job: Job) -> dict[str, str | None]:
    if "%" in str(job.folder):
        raise ConfigError(
            f"the run's folder {job.folder} contains '%', which Slurm would expand: choose another "
            "with --run.folder or --run.name"
        )
    return {"output": log_path(job), **job.options}
