"""Graders that run a response's program in a sandbox."""
