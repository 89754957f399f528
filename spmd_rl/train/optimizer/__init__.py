"""Optimizers of sharded parameters, with state on the GPU or on the host."""
