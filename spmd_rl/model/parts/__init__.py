"""Parts of a model, where several ranks of an engine share it."""
