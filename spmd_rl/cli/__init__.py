"""Command line of `spmd-rl`, and the launcher of ranks."""
