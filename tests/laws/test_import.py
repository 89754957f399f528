"""`import spmd_rl` costs next to nothing: no torch, no other heavy package, under a second of
processor time.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.laws.source import ROOT

HEAVY = {"torch", "transformers", "matplotlib", "rich", "zmq"}
PROBE = """
import json, sys, time
began = time.process_time()
{statement}
packages = sorted({{name.split(".")[0] for name in sys.modules}})
print(json.dumps([time.process_time() - began, packages]))
"""


def probe(statement: str) -> tuple[float, set[str]]:
    """Processor seconds and top-level modules of a fresh process after `statement`."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def test_the_package_imports_fast_and_light() -> None:
    seconds, modules = probe("import spmd_rl")
    assert modules & HEAVY == set()
    assert seconds < 1.0


def test_config_and_errors_need_no_torch() -> None:
    light = ("config.load", "types.samples", "errors", "data.files.files", "hooks.rank.pool")
    _, modules = probe("import " + ", ".join(f"spmd_rl.{name}" for name in light))
    assert modules & HEAVY == set()


def test_a_heavy_import_is_seen() -> None:
    _, modules = probe("import zmq")
    assert modules & HEAVY == {"zmq"}
