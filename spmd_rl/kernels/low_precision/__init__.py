"""Weights in 8 bits whose values both the trainer and the engine multiply with."""
