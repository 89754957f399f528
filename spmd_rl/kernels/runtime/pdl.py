"""Programmatic dependent launch: kernels that begin while the one ahead still runs.

NVIDIA Hopper and newer have it; on other GPUs nothing changes. Such a kernel is launched with
`overlapping()` and calls `wait()` in every program. It does so before it reads what an earlier
kernel may have written (linear/gluon.py says why weights are exempt), and before it writes
anything. From then on the next kernel may begin. A kernel ends only after it has waited, so waiting
for the last kernel is waiting for all before it. Other kernels on the stream are not affected.

A kernel that is launched plainly begins when all before it have ended, and nothing overlaps it. So
what existed before the last such kernel may be read before `wait()`. In a step of the network that
kernel is the embedding lookup. Positions, lengths, pages and the keys of earlier steps may
therefore be read early.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver


@cache
def overlapping() -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait`."""
    target = driver.active.get_current_target()
    return {"launch_pdl": True} if target.backend == "cuda" and target.arch >= 90 else {}


@triton.jit
def let_next_begin() -> None:
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait() -> None:
    """Let the next kernel begin, and wait until all earlier ones have ended."""
    let_next_begin()
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
