"""Attention in windows and with sinks on NVIDIA GPUs."""
