"""Models whose weights are in few bits."""
