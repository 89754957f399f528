"""Parts of a model, where several ranks share it."""
