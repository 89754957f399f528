"""Attention over packed sequences and over a paged KV cache; `backend.py` chooses the kernels."""
