"""Choices of cuBLAS algorithms that earlier processes made, from the disk cache.

Timing the algorithms of all shapes takes seconds of each start. What is kept names an algorithm,
and decides on speed alone: its bits are compared with the reference kernel's in each process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from spmd_rl.kernels.linear import cublas
from spmd_rl.kernels.linear.cublaslt import (
    CublasAlgorithm,
    Gemm,
    Shape,
    library_version,
    propose_algorithms,
)
from spmd_rl.kernels.runtime.cache_key import gpu, package_versions, sources_digest
from spmd_rl.kernels.runtime.disk_cache import cache_name, user_cache

OURS = b"ours"
DRIVER = Path("/proc/driver/nvidia/version")


def choose(shape: Shape, least_rows: int, ours: Gemm) -> Gemm | None:
    """Choose as `cublas.choose` does, or as an earlier process did for this shape."""
    return cublas.choose(shape, least_rows, ours, recall_or_race)


def recall_or_race(shape: Shape, least_rows: int, ours: Gemm) -> Gemm:
    """Return the choice that is kept if it still holds; else race, and keep the winner."""
    if (disk := user_cache()) is None:
        return cublas.race(shape, least_rows, ours)
    name = _name(shape, least_rows)
    kept = disk.read(name)
    if kept == OURS:
        return ours
    if kept is not None and (way := _way(kept, shape, least_rows)) is not None:
        return way
    best = cublas.race(shape, least_rows, ours)
    disk.write(name, best.identity if isinstance(best, CublasAlgorithm) else OURS)
    return best


def _way(identity: bytes, shape: Shape, least_rows: int) -> CublasAlgorithm | None:
    """Return the algorithm of this identity if cuBLAS proposes it and it has the bits."""
    shapes = dict.fromkeys((shape, shape._replace(rows=least_rows)))
    for way in propose_algorithms(shape):
        if way.identity == identity and way.splits <= 1:
            return way if all(cublas.serves(way, one) for one in shapes) else None
    return None


def _name(shape: Shape, least_rows: int) -> str:
    sizes = shape.n, shape.k, shape.width, shape.rows, least_rows
    facts = _software(), gpu(shape.device)
    return cache_name("cublas", facts, (*sizes, shape.has_bias, str(shape.out_dtype)))


@cache
def _software() -> tuple[object, ...]:
    """Return what the times depend on besides the GPU: ours are of Triton and the CuTe DSL."""
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    return library_version(), driver, package_versions(), sources_digest()
