"""`spmd-rl submit`: queue a run as a Slurm job, after checking its config.

    spmd-rl submit RECIPE [--a.b=c ...] --nodes N --time T --partition P [--dry-run]

It takes the arguments of `spmd-rl run` and options for Slurm. The same command resumes the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from spmd_rl.config.dump import dump_toml
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.recipe import (
    CommandParser,
    Invocation,
    load_recipe,
    require_counts,
    run_config,
)
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import plan_split
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.plan.axes import check_axes
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.slurm.script import Job, render

# what Slurm allocates, and who is charged
OPTIONS: dict[str, tuple[type, str]] = {
    "nodes": (int, "number of nodes (default: 1)"),
    "time": (
        str,
        "time limit, such as 4:00:00; two minutes before it, the run saves and queues again",
    ),
    "partition": (str, "partition to queue in (default: Slurm's)"),
    "gpus-per-node": (int, "GPUs to allocate on each node"),
    "account": (str, "account to charge (default: Slurm's)"),
    "qos": (str, "quality of service (default: Slurm's)"),
    "job-name": (str, "name of the job (default: the run's name)"),
}
MINIMUM = {"nodes": 1, "gpus_per_node": 1, "nproc_per_node": 1, "max_restarts": 0}


def main(words: list[str]) -> int:
    """Queue a run, or print its script. `words` are the arguments after `spmd-rl submit`.

    Raises: ConfigError when the recipe or Slurm refuses an argument.
    """
    args, run_words = _parser().parse_known_args(words)
    if args.help or not run_words:
        _parser().print_help()
        return 0 if args.help else 2
    job = plan_job(args, run_words)
    if job.note:
        print(job.note, file=sys.stderr)
    script = render(job)
    if args.dry_run:
        print(script, end="")
        return 0
    job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (job.folder / "logs").mkdir(exist_ok=True)
    number = _sbatch(script)
    print(
        f"job {number}: {job.folder}/logs/slurm_{number}.log is its log, with one a node beside it"
    )
    return 0


def plan_job(args: argparse.Namespace, run_words: list[str]) -> Job:
    """Return the job for these arguments, once the recipe has accepted its part of them.

    Raises: ConfigError, PlanError.
    """
    invocation = Invocation.parse(run_words)
    cfg = load_recipe(invocation.recipe).accept(invocation)
    require_counts(args, MINIMUM)
    needs = RunNeeds.of(cfg)
    nproc = args.nproc_per_node or invocation.nproc or args.gpus_per_node or needs.nproc or 0
    if nproc and needs.split is not None:
        check_axes(needs, plan_split(needs.split, args.nodes * nproc))
    run = run_config(cfg)
    return Job(
        words=tuple(run_words),
        folder=Path(os.path.abspath(run.path)),
        python=sys.executable,
        nproc=nproc,
        max_restarts=args.max_restarts,
        options={"job-name": run.path.name, **_options(args)},
        note=_note(cfg, run),
    )


def _note(cfg: object, run: RunConfig) -> str:
    """Return what the job will find in the run's folder, in a sentence; "" for a new run.

    Raises: ConfigError where the run cannot go on in the folder.
    """
    folder = RunFolder(run.path)
    folder.check_reusable(dump_toml(cfg), run.resume)
    rows = read_metrics(folder.metrics)
    done = rows[-1]["step"] if rows else 0
    if done < 1:  # a run that stopped in its warm-up begins again
        return ""
    needs = RunNeeds.of(cfg)
    found = f"{run.path} holds this run up to step {done}"
    if not needs.epochs and 0 < needs.steps <= done:
        return (
            f"{found}, which is its last: the job would train nothing; add --run.name for another "
            "run, or raise --steps"
        )
    return f"{found}: the job goes on from its newest checkpoint"


def _options(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the options for sbatch."""
    values = {flag: getattr(args, flag.replace("-", "_")) for flag in OPTIONS}
    requeue: dict[str, str | None] = {"requeue" if args.requeue else "no-requeue": None}
    return (
        {flag: str(value) for flag, value in values.items() if value}
        | requeue
        | dict(map(_option, args.slurm))
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="spmd-rl submit",
        usage="spmd-rl submit RECIPE [--config F.toml] [--a.b=c ...] [options]",
        description="Queue a run as a Slurm job. All other arguments go to `spmd-rl run`.",
        add_help=False,
        allow_abbrev=False,
    )
    for name, (kind, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.set_defaults(nodes=1)
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        help="ranks to start on each node (default: one a GPU, else 1)",
    )
    parser.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let Slurm start the job again (default: --requeue)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="how often torchrun may restart all ranks (default: 3)",
    )
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="--X=Y", help="any other option for sbatch"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--help", "-h", action="store_true", help="print this help")
    return parser


def _option(text: str) -> tuple[str, str | None]:
    """Return name and value of an option such as `--exclusive` or `--mem=0`."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not text.startswith("--") or not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"--slurm={text}: write it as --slurm=--exclusive or --slurm=--mem=0")
    if name in (*OPTIONS, "requeue", "no-requeue"):
        raise ConfigError(f"--slurm={text}: submit has this option itself, so write {text}")
    return name, value if equals else None


def _sbatch(script: str) -> str:
    """Submit the script, and return the number of the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=os.fsencode(script), capture_output=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not installed here: submit from a login node, or use --dry-run"
        ) from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise ConfigError(f"Slurm refused the job: {reason}")
    return done.stdout.decode().strip().partition(";")[0]
