"""`spmd-rl completion`: what a shell proposes for a command line."""
