"""`spmd-rl run` with a fault installed in the ranks that it forks."""

from __future__ import annotations

import sys

from spmd_rl.cli import rank
from spmd_rl.cli.main import main
from tests.system.faults import install_in_rank

real = rank.run_rank


def run_rank(words: list[str]) -> int:
    install_in_rank()
    return real(words)


if __name__ == "__main__":
    rank.run_rank = run_rank
    sys.exit(main())
