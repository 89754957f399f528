"""Weights in few bits whose values both the trainer and the engine multiply with."""
