"""Models whose weights are in 8 bits."""
