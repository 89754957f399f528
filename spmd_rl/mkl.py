"""What the processor asks for before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MKL_ON_INTEL = "AVX2,STRICT"


def pin_sums(environment: MutableMapping[str, str] = os.environ, cpuinfo: Path = CPUINFO) -> None:
    """Has MKL sum alike for any number of rows on an Intel processor, where it would not by itself.

    MKL reads the variable at its first product. What is set stays. On other processors MKL needs no
    such word.
    """
    try:
        with cpuinfo.open(encoding="ascii", errors="replace") as file:
            is_intel = "GenuineIntel" in file.read(200)
    except OSError:  # not Linux
        return
    if is_intel:
        environment.setdefault("MKL_CBWR", MKL_ON_INTEL)
