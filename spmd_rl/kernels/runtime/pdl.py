"""Kernels that begin while the one before them still runs (programmatic dependent launch, NVIDIA
Hopper and newer).

Such a kernel is launched with `overlapping()` and calls `wait()` in every program: before it reads
what an earlier kernel may have written (`linear_gluon` says why weights are not), and before it
writes anything. By then the next kernel may begin in turn. A kernel ends only after it has waited,
so whoever has waited for the last one has waited for all before it. Other kernels on the stream
neither see nor break any of this; nor do GPUs that lack it.

A kernel launched plainly begins when all before it have ended, and nothing overlaps it. What was
there before the last such kernel may therefore be read before `wait()`: in a step of the network
that is the look-up of embeddings, so positions, lengths, pages and the keys of earlier steps are
such.
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
    """Options for the launch of a kernel that calls `wait`."""
    target = driver.active.get_current_target()
    return {"launch_pdl": True} if target.backend == "cuda" and target.arch >= 90 else {}


@triton.jit
def let_next_begin() -> None:
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait() -> None:
    """Let the next kernel begin, and go on once all earlier ones have ended and their results can
    be read.
    """
    let_next_begin()
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
