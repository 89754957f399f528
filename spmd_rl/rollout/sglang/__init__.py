"""SGLang engine: an SGLang scheduler in a child process of each rank, and this rank's end of it.

`child.py` alone runs in the child, under SGLang's own packages. Nothing else here imports SGLang.
"""
