"""Who sits where: torchrun's environment, the split into roles, meshes and process groups. Nothing
else makes them.
"""
