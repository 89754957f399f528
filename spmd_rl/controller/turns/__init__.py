"""Turns: which commands the ranks of a group run between the same two pumps of a role."""
