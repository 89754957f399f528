"""`spmd-rl submit`: a run as a Slurm job, checked before it queues.

    spmd-rl submit RECIPE [--a.b=c ...] --nodes N --time T --partition P [--dry-run]

It takes the words of `spmd-rl run` and some of Slurm's. The same command again resumes the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from spmd_rl.controller.run.recipe import Invocation, load_recipe, run_config
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import plan_split
from spmd_rl.slurm.script import Job, render

FLAGS = ("nodes", "time", "partition", "gpus-per-node", "account", "qos", "job-name")
LEAST = {"nodes": 1, "gpus_per_node": 1, "nproc_per_node": 1, "max_restarts": 0}


def main(words: list[str]) -> int:
    """Queue a run, or print its script; `words` are those after `spmd-rl submit`.

    Raises: ConfigError when a word is wrong, in the recipe's eyes or in Slurm's.
    """
    try:
        asked, run_words = _parser().parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"spmd-rl submit: {error}") from error
    if asked.help or not run_words:
        _parser().print_help()
        return 0 if asked.help else 2
    job = plan_job(asked, run_words)
    script = render(job)
    if asked.dry_run:
        print(script, end="")
        return 0
    job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (job.folder / "logs").mkdir(exist_ok=True)
    number = _sbatch(script)
    print(f"job {number}: {job.folder}/logs/slurm_{number}.log, and a log a node beside it")
    return 0


def plan_job(asked: argparse.Namespace, run_words: list[str]) -> Job:
    """The job for these words, once the recipe has accepted its part of them. Raises: ConfigError,
    PlanError.
    """
    invocation = Invocation.parse(run_words)
    cfg = load_recipe(invocation.recipe).accept(invocation)
    _check_counts(asked)
    nproc = (
        asked.nproc_per_node
        or invocation.nproc
        or asked.gpus_per_node
        or getattr(cfg, "nproc", 0)
        or 0
    )
    if nproc and hasattr(cfg, "split"):
        plan_split(cfg.split, asked.nodes * nproc)
    run = run_config(cfg)
    return Job(
        words=tuple(run_words),
        folder=Path(os.path.abspath(run.path)),
        python=sys.executable,
        nproc=nproc,
        max_restarts=asked.max_restarts,
        options={"job-name": run.path.name, **_options(asked)},
    )


def _check_counts(asked: argparse.Namespace) -> None:
    for name, least in LEAST.items():
        count = getattr(asked, name)
        if count is not None and count < least:
            raise ConfigError(f"--{name.replace('_', '-')}={count}: expected {least} or more")


def _options(asked: argparse.Namespace) -> dict[str, str | None]:
    """What was asked of Slurm, as options of sbatch."""
    values = {flag: getattr(asked, flag.replace("-", "_")) for flag in FLAGS}
    requeue: dict[str, str | None] = {"requeue" if asked.requeue else "no-requeue": None}
    return (
        {flag: str(value) for flag, value in values.items() if value}
        | requeue
        | dict(map(_option, asked.slurm))
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd-rl submit",
        usage="spmd-rl submit RECIPE [--config F.toml] [--a.b=c ...] [options]",
        description="Queue a run with Slurm. What is not listed here is for `spmd-rl run`.",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--time",
        help="time limit, such as 4:00:00; shortly before it the run saves and queues again",
    )
    parser.add_argument("--partition")
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument(
        "--nproc-per-node", type=int, help="ranks a node (default: one a GPU, else one)"
    )
    parser.add_argument("--account")
    parser.add_argument("--qos")
    parser.add_argument("--job-name", help="default: the run's name")
    parser.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="(default: --requeue)",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="of all ranks before the job fails (default: 3)"
    )
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="--X=Y", help="any other option of sbatch"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script and submit nothing"
    )
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _option(text: str) -> tuple[str, str | None]:
    """`--exclusive` or `--mem=0` as a name and a value."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not text.startswith("--") or not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"--slurm={text}: write it as --slurm=--exclusive or --slurm=--mem=0")
    if name in (*FLAGS, "requeue", "no-requeue"):
        raise ConfigError(f"--slurm={text}: write it as {text}")
    return name, value if equals else None


def _sbatch(script: str) -> str:
    """Submit; the job's number."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=os.fsencode(script), capture_output=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "there is no sbatch here: submit from a login node, or look at --dry-run"
        ) from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise ConfigError(f"Slurm refused the job: {reason}")
    return done.stdout.decode().strip().partition(";")[0]
