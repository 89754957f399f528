"""MKL's order of summation, which has to be fixed before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MKL_ON_INTEL = "AVX2,STRICT"


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
