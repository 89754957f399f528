"""Reward functions that are shipped: a few that compare texts.

A reward function takes `(prompt: Prompt, sample: Sample)`. It returns a float, or a dict of floats:
training learns from the entry "reward", and the other entries are logged beside it.
"""
