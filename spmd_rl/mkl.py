"""What MKL needs to be told before it computes, so that equal inputs give equal bits."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MKL_ON_INTEL = "AVX2,STRICT"
# those that torch takes from MKL (aten/src/ATen/cpu/vml.h)
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2"),
    *("sin", "sqrt", "tan", "tanh", "trunc"),
)


def pin_sums(environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = CPUINFO) -> None:
    """Make MKL sum in the same order for any number of rows.

    By default it does not on Intel processors; on others it does. MKL reads the variable at its
    first product. A value that the user has set stays.
    """
    try:
        with cpuinfo.open(encoding="ascii", errors="replace") as file:
            is_intel = "GenuineIntel" in file.read(200)
    except OSError:  # this is not Linux
        return
    if is_intel:
        environment.setdefault("MKL_CBWR", MKL_ON_INTEL)


@cache
def warm_up_functions() -> None:
    """Make each elementwise function of MKL choose its kernel, on this thread alone.

    Call it before the first of them has work for several threads. When MKL before 2025.0 meets a
    function first on several threads at once, one of them may run a kernel of low accuracy for its
    part of that call. Source: pytorch/pytorch issue 188792.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
