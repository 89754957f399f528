"""Replay of a role on ranks that share its work: what each records, and all of it as one pass."""
