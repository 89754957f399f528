"""Taps: points in a forward pass, and what is done with the tensors there."""
