"""Algorithms as pure functions: advantages, losses, packing. No process, no device, no file is
touched here.
"""
