"""Number formats of weights and of cached keys and values, one file a format of weights. No torch.

A format says its layout, its rounding and how a folder names it. All that trains, pushes, serves,
counts and saves weights in few bits takes it from `FORMATS`.
"""

from typing import Literal

from spmd_rl.model.formats.e4m3 import E4M3
from spmd_rl.model.formats.int4 import INT4
from spmd_rl.types.code_format import CodeFormat

WeightFormat = Literal["full", "e4m3", "int4"]
FORMATS: dict[WeightFormat, CodeFormat] = {"e4m3": E4M3, "int4": INT4}

__all__ = ["FORMATS", "WeightFormat"]
