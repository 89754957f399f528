"""`python -m spmd_rl`: one rank under torchrun."""

from __future__ import annotations

import sys

from spmd_rl.cli.rank import rank_main

if __name__ == "__main__":
    sys.exit(rank_main())
