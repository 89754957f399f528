"""`spmd-rl check`: find out whether this host is fit for a run, and a run's input for its recipe.

    spmd-rl check [--run.folder=runs]         this host
    spmd-rl check RECIPE [--a.b=c ...]        this host, and the input of a run
    srun --ntasks-per-node=1 spmd-rl check    every node of a Slurm job
    torchrun ... -m spmd_rl check             every node, and how far their clocks differ

It prints one line a finding: ok, warn or fail, with the fix.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from spmd_rl.check import facts, findings, probe
from spmd_rl.check.clocks import rank_skew
from spmd_rl.check.findings import HostFinding
from spmd_rl.controller.run.recipe import Invocation, load_recipe, run_config
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World


def main(words: list[str]) -> int:
    """Check this host and print the findings. Returns 1 if any of them is a failure, else 0.

    Ranks: all, under torchrun; the first rank of each node checks and prints.
    Blocks: for seconds, or for minutes if a GPU hangs.
    Raises: ConfigError or DataError, as `spmd-rl run`, where the words name a recipe.
    """
    names_recipe = bool(words) and not words[0].startswith("-")
    folder, accepted = _accepted(words) if names_recipe else (_folder(words), [])
    world = World.from_env() if "RANK" in os.environ else None
    skew = facts.file_skew(folder) if world is None else rank_skew(world)
    if world is not None and world.local_rank != 0:
        return 0
    num_nodes = world.num_nodes if world else int(os.environ.get("SLURM_NNODES", "1"))
    results = [*accepted, *check_host(folder, skew, num_nodes)]
    one_host = world is None and "SLURM_JOB_ID" not in os.environ
    host = "" if one_host else f"{socket.gethostname()}  "
    print("\n".join(f"{host}{finding}" for finding in results), flush=True)
    return int(any(finding.level == "fail" for finding in results))


def _accepted(words: list[str]) -> tuple[Path, list[HostFinding]]:
    """Check the input of a run, and return the folder of runs and the finding that it is right."""
    invocation = Invocation.parse(words)
    cfg = load_recipe(invocation.recipe).accept(invocation)
    return Path(run_config(cfg).folder), [findings.run(invocation.name)]


def _folder(words: list[str]) -> Path:
    """Return the folder that `words` name, which name no recipe."""
    parser = argparse.ArgumentParser(
        prog="spmd-rl check",
        usage="spmd-rl check [--run.folder FOLDER], or spmd-rl check RECIPE [--a.b=c ...]",
        epilog="With a recipe and its settings, what `spmd-rl run` checks before it starts is "
        "checked too: settings, model, data, reward and hooks.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--run.folder",
        dest="folder",
        type=Path,
        default=Path("runs"),
        help="the folder in which runs are written (default: runs)",
    )
    try:
        args, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"spmd-rl check: {error}") from error
    if unknown:
        raise ConfigError(
            f"spmd-rl check has no option {unknown[0]}: it takes --run.folder=FOLDER, or a recipe "
            "and its settings, such as `spmd-rl check grpo --model PATH --data FILE`"
        )
    folder: Path = args.folder
    return folder


def check_host(folder: Path, skew: facts.ClockSkew, num_nodes: int) -> list[HostFinding]:
    """Return every finding about this host, which is one of `num_nodes`."""
    version = facts.torch_version()
    gpus = probe.gpus(version)
    num_gpus = len(gpus.names)
    limits = facts.system_limits()
    network = facts.network()
    runs_folder = facts.runs_folder(folder)
    return [
        findings.python(sys.version_info[:2]),
        findings.torch(version),
        findings.driver(gpus),
        findings.peers(gpus),
        findings.nccl(probe.run_trial("nccl") if num_gpus > 1 else None),
        findings.ipc(probe.run_trial("ipc") if num_gpus else None),
        findings.files(limits),
        findings.memlock(limits),
        findings.shared_memory(limits, num_gpus),
        findings.ports(network, num_nodes),
        findings.clock(skew),
        findings.slurm(os.environ, num_gpus, len(os.sched_getaffinity(0))),
        findings.folder(runs_folder),
        findings.sandbox(facts.sandbox_problem()),
    ]
