"""Data types of a run: prompts, samples and groups, their columns, and training batches."""
