"""`spmd-rl run`, with a fault installed in the ranks that it forks."""

from __future__ import annotations

import sys

from spmd_rl.cli import main
from tests.system.faults import install_in_rank

real = main._forked_rank


def forked_rank(words: list[str]) -> int:
    install_in_rank()
    return real(words)


if __name__ == "__main__":
    main._forked_rank = forked_rank
    sys.exit(main.main())
