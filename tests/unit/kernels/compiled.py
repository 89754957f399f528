"""Triton kernels compiled for Hopper without a GPU, by a driver that never launches."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

WARP = 32
HOPPER = GPUTarget("cuda", 90, WARP)
SHARED_BYTES = 227 << 10  # what a block may take there
_INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)", re.MULTILINE)
_SPILLED = re.compile(r"(\d+) bytes spill")
_SHUFFLE = re.compile(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),")


class _Driver:
    """Driver that answers what Triton asks of CUDA's."""

    utils = SimpleNamespace(
        load_binary=lambda *given: (0, 0, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
    )

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(target: GPUTarget = HOPPER) -> Iterator[None]:
    """Within, a launch on host tensors compiles its kernel as on an H200 and computes nothing."""
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


def compiled_of(kernel: Any, launch: Callable[[], Any], capability: int = HOPPER.arch) -> Any:
    """Return the one specialisation of `kernel` that `launch` compiles."""
    kernel.device_caches.clear()
    with compiling(GPUTarget("cuda", capability, WARP)):
        launch()
    (compiled,) = kernel.device_caches[0][0].values()
    return compiled


def ptx_of(kernel: Any, launch: Callable[[], Any]) -> str:
    """Return the PTX code of `kernel` as `launch` compiles it."""
    return str(compiled_of(kernel, launch).asm["ptx"])


def spilled_bytes(ptx: str) -> int:
    """Return how many bytes of registers a thread keeps in memory where PTX is assembled."""
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "-"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    stores, loads = map(int, _SPILLED.findall(said))
    return stores + loads


def instructions(ptx: str) -> Counter[str]:
    return Counter(_INSTRUCTION.findall(ptx))


def shuffles(ptx: str) -> list[int]:
    """Return how far apart the lanes are that add to each other, in the order of the code."""
    return [int(distance) for distance in _SHUFFLE.findall(ptx)]
