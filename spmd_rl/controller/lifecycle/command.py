"""`spmd-rl stacks`: print the Python stacks of every process of a live run."""

from __future__ import annotations

import sys
from pathlib import Path

from spmd_rl.controller.lifecycle.stack_server import ask

USAGE = "usage: spmd-rl stacks RUN"


def main(words: list[str]) -> int:
    """Print the stacks of the run in the folder that `words` name."""
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    if len(words) != 1:
        print(USAGE, file=sys.stderr)
        return 2
    print(ask(Path(words[0])))
    return 0
