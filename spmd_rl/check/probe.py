"""Trials on the GPUs, each in a process of its own, so that one which hangs or crashes is a finding
like others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from spmd_rl.check.facts import Gpus, Probe, nvidia_devices, nvidia_driver

PROBE_S = 90.0  # to import torch, create contexts, and try


def run(what: str, *words: str, within_s: float = PROBE_S) -> Probe:
    """The trial `what` in a child. Blocks: for `within_s` at most; then the child is killed, and
    that is the result.
    """
    command = [sys.executable, "-m", "spmd_rl.check.trials", what, *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"no result within {within_s:g} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        complaint = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        return Probe(False, complaint[-1])
    return Probe(True, lines[-1])


def gpus(torch_version: str | None) -> Gpus:
    """The GPUs as torch sees them, asked in a child; a CPU build of torch is not asked."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    seen = Gpus(nvidia_devices(), nvidia_driver(), None, hidden=hidden)
    if torch_version is None or torch_version.endswith("+cpu"):
        return seen
    probe = run("gpus")
    if not probe.ok:
        return dataclasses.replace(seen, cuda="unknown", error=probe.said)
    told: dict[str, Any] = json.loads(probe.said)
    strangers = tuple((a, b) for a, b in told["strangers"])
    return dataclasses.replace(
        seen,
        cuda=told["cuda"],
        names=tuple(told["names"]),
        strangers=strangers,
        error=told["error"],
    )
