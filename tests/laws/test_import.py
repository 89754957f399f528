"""`import spmd_rl` costs next to nothing: no torch, no other heavy package, under a second."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.laws.source import ROOT

HEAVY = {"torch", "transformers", "matplotlib", "rich", "zmq"}
PROBE = """
import json, sys, time
began = time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - began, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""


def probe(statement: str) -> tuple[float, set[str]]:
    """Seconds and top-level modules of a fresh process after `statement`."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def test_the_package_imports_fast_and_light() -> None:
    tries = [probe("import spmd_rl") for _ in range(3)]
    assert all(modules & HEAVY == set() for _, modules in tries)
    assert min(seconds for seconds, _ in tries) < 1.0, "of three tries on a busy machine the best"


def test_config_and_errors_need_no_torch() -> None:
    _, modules = probe("import spmd_rl.config, spmd_rl.types, spmd_rl.errors, spmd_rl.data.files, spmd_rl.rewards.load")
    assert modules & HEAVY == set()


def test_a_heavy_import_is_seen() -> None:
    _, modules = probe("import zmq")
    assert modules & HEAVY == {"zmq"}
