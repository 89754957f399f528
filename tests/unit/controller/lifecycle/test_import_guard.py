"""The import of a user's file: how it ends a process that would wait for it, or end silently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.controller.run.recipe import load_recipe
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.load import load_function

LAST_RESORT_S = 300
PROGRAM = """
import sys
from spmd_rl.controller.lifecycle import import_guard
import_guard.importing.__wrapped__.__defaults__ = (float(sys.argv[3]),)
import_guard.WORD_S = 0.01
from spmd_rl.hooks.load import load_function
from spmd_rl.controller.run.recipe import load_recipe
load_recipe(sys.argv[2]) if sys.argv[1] == "recipe" else load_function("reward", sys.argv[2])
print("imported")
"""
NEVER = "import threading\nthreading.Event().wait()\n"
STUBBORN = "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"


@pytest.mark.parametrize("text", [NEVER, STUBBORN, "print('x' * 5_000_000)\n" + NEVER])
@pytest.mark.parametrize("kind", ["reward", "recipe"])
def test_an_import_that_does_not_end_ends_the_process(tmp_path: Path, kind: str, text: str) -> None:
    file = tmp_path / "mine_of_import_guard.py"
    file.write_text(text)
    name = str(file) if kind == "recipe" else f"{file}:grade"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, name, "0.2"],
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_S,
        check=False,
    )
    said = name if kind == "recipe" else f"reward {name!r}"
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        f"{said}: it is still being imported",
        f"{said}: it was not imported within 0.2 s: what takes long, or waits, belongs into a "
        "function that the run calls",
    ]
    assert "imported" not in done.stdout


LEAVES = {
    "exit": ("import sys\nsys.exit(0)\n", "raised SystemExit"),
    "_exit": ("import os\nos._exit(0)\n", r"ends the process \(os._exit, 0\)"),
    "cancelled": ("import asyncio\nraise asyncio.CancelledError('no')\n", "CancelledError: no"),
    "forks": ("import os\nif not os.fork(): os._exit(0)\n1 / 0\n", "raised ZeroDivisionError"),
}


@pytest.mark.parametrize(("text", "problem"), LEAVES.values(), ids=LEAVES)
def test_an_import_that_would_end_the_process_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"leaves.py:grade'?: importing it .*{problem}"):
        load_function("reward", f"{file}:grade")


def test_a_recipe_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe_of_import_guard.py"
    file.write_text("import os\nos._exit(0)\n")
    with pytest.raises(ConfigError, match="recipe_of_import_guard.py: importing it ends"):
        load_recipe(str(file))


def test_threads_of_an_import_do_not_hold_it_back(tmp_path: Path) -> None:
    file = tmp_path / "starts_threads.py"
    file.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def grade(prompt, sample): return 1.0\n"
    )
    assert load_function("reward", f"{file}:grade")(None, None) == 1.0
