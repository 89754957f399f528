"""Kinds of layers: each says once what it consists of, what it costs, and how it is cut.

`<kind>.py` is plain data without torch; `<kind>_module.py` beside it is the layer's torch module.
"""
