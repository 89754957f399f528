"""Planted mistakes, each of which named tests must catch.

    python -m tests.mutations [ROOM ...]

Each mutation is one change of one line in a copy of the package. Its tests pass before, and must
fail with it. A mutation that they pass survives: then a test is missing, or no longer tests.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import tomllib
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.fsdp  # noqa: F401  for the processes that are forked

ROOT = Path(__file__).parents[2]
OPTIONS = [*"-qx --timeout=300 -p no:cacheprovider -m".split(), "not gpu and not backends"]


class Mutation(NamedTuple):
    """What a file of a room says, what it says instead, and the tests that notice, by spaces."""

    file: str
    old: str
    new: str
    tests: str


def load() -> dict[str, list[Mutation]]:
    """Return the mutations of each room."""
    rooms = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text())
    return {room: [Mutation(*one) for one in found] for room, found in rooms.items()}


def mutated(text: str, mutation: Mutation) -> str:
    """Return the text with the mutation. Raises: ValueError where its old words do not stand once.

    They may have been rewritten since: then the mutation is planted anew in what replaced them.
    """
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has not once: {mutation.old}")
    return text.replace(mutation.old, mutation.new)


def outcome_of(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests in the copy, and return pytest's exit code and what it said.

    They run in a process forked from this one, which has imported what takes long. The code is 0
    where all pass, 1 where one fails, and 2 where one cannot be imported.
    """
    with tempfile.NamedTemporaryFile("w+") as said:
        process = get_context("fork").Process(target=_run, args=(copy, tests, said.fileno()))
        process.start()
        process.join()
        said.seek(0)
        if process.exitcode not in (0, 1, 2):
            raise RuntimeError(f"{' '.join(tests)} did not run:\n{said.read()}")
        return process.exitcode, said.read()


def _run(copy: Path, tests: list[str], said: int) -> None:
    for stream in (1, 2):
        os.dup2(said, stream)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True  # a mutated file may be as old and as long as the file was
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "spmd_rl")]:
        del sys.modules[name]
    sys.exit(pytest.main([*OPTIONS, *(f"tests/{test}" for test in tests)]))


def survives(copy: Path, room: str, mutation: Mutation) -> bool:
    """Plant a mutation in the copy, run its tests, and take it back."""
    path = copy / "spmd_rl" / room / mutation.file
    text = path.read_text()
    path.write_text(mutated(text, mutation))
    try:
        return outcome_of(copy, mutation.tests.split())[0] == 0
    finally:
        path.write_text(text)


def main(names: list[str]) -> int:
    """Say of each mutation whether it is caught, and return how many survive."""
    rooms = {room: found for room, found in load().items() if not names or room in names}
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=_but_sources))
        used = {test for found in rooms.values() for one in found for test in one.tests.split()}
        code, said = outcome_of(copy, sorted(used))
        if code:
            raise RuntimeError(f"the tests fail without a mutation:\n{said}")
        for room, found in rooms.items():
            for mutation in found:
                start, lives = time.monotonic(), survives(copy, room, mutation)
                num_survivors += lives
                verdict = f"{'SURVIVES' if lives else 'caught'} {time.monotonic() - start:5.1f} s"
                print(f"{verdict}  {room}/{mutation.file}: {mutation.new}", flush=True)
    return num_survivors


def _but_sources(folder: str, names: list[str]) -> set[str]:
    """Name what the copy of the repository's root leaves out."""
    kept = {"spmd_rl", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "setup.py"}
    return set(names) - kept if Path(folder) == ROOT else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
