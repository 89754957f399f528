"""All formats of weights in few bits, by their names in settings."""

from __future__ import annotations

from spmd_rl.kernels.low_precision.code_format import CodeFormat
from spmd_rl.kernels.low_precision.e4m3_blocks import E4M3
from spmd_rl.kernels.low_precision.int4_groups import INT4

FORMATS: dict[str, CodeFormat] = {one.layout.name: one for one in (E4M3, INT4)}
