"""`spmd-rl check`: is this host fit for a run? One line a finding: ok, warn or fail, with the fix.

spmd-rl check [--run.folder=runs]                              this host
srun --ntasks-per-node=1 spmd-rl check                         every node of a job
torchrun ... -m spmd_rl check        every node, and how far their clocks differ
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from spmd_rl.check import facts, findings, probe
from spmd_rl.check.clocks import rank_skew
from spmd_rl.check.findings import Finding
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World


def main(words: list[str]) -> int:
    """Look at this host and print what was found; `words` are those after `spmd-rl check`. 1 when
    anything fails.

    Ranks: all, when under torchrun; the first of each node looks and prints.
    Blocks: for seconds, or minutes where a GPU hangs.
    """
    asked = _parse(words)
    world = World.from_env() if "RANK" in os.environ else None
    skew = facts.file_skew(asked.folder) if world is None else rank_skew(world)
    if world is not None and world.local_rank != 0:
        return 0
    found = look(
        asked.folder, skew, world.num_nodes if world else int(os.environ.get("SLURM_NNODES", "1"))
    )
    host = "" if world is None and "SLURM_JOB_ID" not in os.environ else f"{socket.gethostname()}  "
    print("\n".join(f"{host}{finding}" for finding in found), flush=True)
    return int(any(finding.level == "fail" for finding in found))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spmd-rl check", allow_abbrev=False, exit_on_error=False)
    parser.add_argument(
        "--run.folder",
        dest="folder",
        type=Path,
        default=Path("runs"),
        help="where runs are written",
    )
    try:
        asked, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"spmd-rl check: {error}") from error
    if unknown:
        raise ConfigError(f"spmd-rl check does not know {unknown[0]}: it takes --run.folder=FOLDER")
    return asked


def look(folder: Path, skew: facts.ClockSkew, num_nodes: int) -> list[Finding]:
    """Every finding about this host, one of `num_nodes`."""
    version = facts.torch_version()
    gpus = probe.gpus(version)
    num_gpus = len(gpus.names)
    limits = facts.limits()
    return [
        findings.python(sys.version_info[:2]),
        findings.torch(version),
        findings.driver(gpus),
        findings.peers(gpus),
        findings.nccl(probe.run("nccl") if num_gpus > 1 else None),
        findings.ipc(probe.run("ipc") if num_gpus else None),
        findings.files(limits),
        findings.memlock(limits),
        findings.shared_memory(limits, num_gpus),
        findings.ports(facts.ports(), num_nodes),
        findings.clock(skew),
        findings.slurm(os.environ, num_gpus, len(os.sched_getaffinity(0))),
        findings.folder(facts.folder(folder)),
    ]
