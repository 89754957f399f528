"""The mismatch microscope: where two forward passes over the same tokens part, by how much, and
through which op.

`command` is `spmd-rl mismatch`. `case` is what is replayed and `paths` what replays it; `taps` and
`watch` see the ops, `compare` finds where they part, `identity` the kernels that ran, `verdict` the
words, `report` and `page` the files.
"""
