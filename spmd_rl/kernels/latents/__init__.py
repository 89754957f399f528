"""Attention of all heads to one key, whose latent part is the value too, on NVIDIA GPUs."""
