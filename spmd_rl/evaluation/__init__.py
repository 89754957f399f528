"""Evaluation of a model on sets of prompts that it does not learn from."""
