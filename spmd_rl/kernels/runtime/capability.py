"""Compute capabilities of NVIDIA GPUs, by their major number."""

AMPERE = 8  # the first with bfloat16
HOPPER = 9  # the one on which kernels were compared, bit for bit
BLACKWELL = 10  # for data centres
