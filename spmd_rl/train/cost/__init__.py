"""Cost of training: FLOPs and memory of a step, computed without torch."""
