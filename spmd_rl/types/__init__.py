"""The nouns of a run: prompts, samples and groups, as objects, as columns and as batches."""
