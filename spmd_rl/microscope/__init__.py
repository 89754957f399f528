"""The mismatch microscope: where two forward passes differ, and through which op.

command.py    `spmd-rl mismatch`
options.py    its options
sides.py      the sides of a comparison, by their names
examine.py    runs one examination, from replay to verdict
foreign/      sides that another program computed: dumps of hidden states, and SGLang
replay/       the sequences, and the forward passes that replay them
taps/         hooks on the ops, and what is done with their outputs
diagnose/     comparison, kernels, known arithmetic, planted faults
page/         the verdict in words, the page and the JSON
"""
