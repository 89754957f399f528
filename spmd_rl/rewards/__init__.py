"""Reward functions: how one is named, checked and called, and a few that compare texts.

A reward function is `(prompt: Prompt, sample: Sample) -> float`, or -> dict of floats whose
"reward" is what is learned from and whose other entries are logged beside it.
"""
