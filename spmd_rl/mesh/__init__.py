"""Meshes: torchrun's environment, the split of its ranks into roles, and their process groups.

No other part of the package makes a process group or a device mesh.
"""
