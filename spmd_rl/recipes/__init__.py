"""Shipped recipes, each a page to read, to copy or to run: `spmd-rl run grpo --model PATH ...`."""
