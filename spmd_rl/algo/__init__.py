"""Algorithms as pure functions: advantages, losses, packing.

They touch no process, device or file.
"""
