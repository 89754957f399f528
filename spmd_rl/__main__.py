"""`python -m spmd_rl`: one rank under torchrun, and elsewhere the program `spmd-rl`."""

from __future__ import annotations

import sys

from spmd_rl.cli.main import main
from spmd_rl.cli.rank import is_process_of_a_run, rank_main

if __name__ == "__main__":
    sys.exit(rank_main() if is_process_of_a_run(sys.argv[1:]) else main())
