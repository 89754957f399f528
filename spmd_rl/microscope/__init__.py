"""The mismatch microscope: where two forward passes differ, and through which op.

command.py    `spmd-rl mismatch`
examine.py    runs one examination, from replay to verdict
replay/       the sequences, and the forward passes that replay them
taps/         hooks on the ops, and what is done with their outputs
diagnose/     comparison, kernels, known arithmetic, planted faults
page/         the verdict in words, the page and the JSON
"""
