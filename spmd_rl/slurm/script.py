"""The batch script of a run, from `job.sbatch` and what was asked for. Pure."""

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
    """A run as Slurm is to start it. `options` are sbatch's, by name; None stands for an option
    without a value.
    """

    words: tuple[str, ...]  # what follows `spmd-rl run`
    folder: Path  # of the run, absolute
    python: str
    nproc: int  # ranks a node; 0: one a GPU, else one
    max_restarts: int  # of all ranks, within one life of the job
    options: dict[str, str | None]


def render(job: Job) -> str:
    """The whole script. Raises: ConfigError when a value cannot be said to Slurm."""
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
    """The file of the job's own output, as a pattern of Slurm's."""
    return f"{job.folder}/logs/slurm_%j.log"


def directive(name: str, value: str | None) -> str:
    """One `#SBATCH` line. Raises: ConfigError when Slurm could not read the value back as it is."""
    if value is None:
        return f"#SBATCH --{name}"
    if _CONTROL.search(value) or '"' in value or "\\" in value:
        raise ConfigError(
            f"--{name}={value!r}: Slurm reads no quotes, backslashes or control characters there"
        )
    return f"#SBATCH --{name}={value}" if _PLAIN.fullmatch(value) else f'#SBATCH --{name}="{value}"'


def quote(word: str) -> str:
    """`word` for bash, on one line."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", escaped) + "'"


def _options(job: Job) -> dict[str, str | None]:
    if "%" in str(job.folder):
        raise ConfigError(
            f"the run's folder {job.folder} holds a '%', which Slurm would expand: choose another"
        )
    return {"output": log_path(job), **job.options}
