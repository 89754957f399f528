"""Algorithms as pure functions: advantages, credit, losses, packing.

They touch no process, device or file. `make.py` makes an `Algorithm` of them from settings.
"""
