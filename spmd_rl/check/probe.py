"""Trials on the GPUs, each in a child process, so that a hang or a crash is a finding too."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from spmd_rl.check.facts import Gpus, TrialResult, nvidia_devices, nvidia_driver

TRIAL_S = 90.0  # includes importing torch and creating CUDA contexts


def run_trial(name: str, *words: str, within_s: float = TRIAL_S) -> TrialResult:
    """Run a trial of `trials.py` in a child process.

    Blocks: for `within_s` at most; then the child is killed and the trial has failed.
    """
    command = [sys.executable, "-m", "spmd_rl.check.trials", name, *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return TrialResult(False, f"no result within {within_s:g} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        return TrialResult(False, errors[-1])
    return TrialResult(True, lines[-1])


def gpus(torch_version: str | None) -> Gpus:
    """Return the GPUs as torch sees them in a child process; a CPU build of torch sees none."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    seen = Gpus(nvidia_devices(), nvidia_driver(), None, hidden=hidden)
    if torch_version is None or torch_version.endswith("+cpu"):
        return seen
    trial = run_trial("gpus")
    if not trial.ok:
        return dataclasses.replace(seen, cuda="unknown", error=trial.output)
    facts: dict[str, Any] = json.loads(trial.output)
    return dataclasses.replace(
        seen,
        cuda=facts["cuda"],
        names=tuple(facts["names"]),
        no_peer_access=tuple((a, b) for a, b in facts["no_peer_access"]),
        error=facts["error"],
    )
