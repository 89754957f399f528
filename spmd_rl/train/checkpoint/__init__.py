"""Checkpoints of a trainer, and exported model folders."""
