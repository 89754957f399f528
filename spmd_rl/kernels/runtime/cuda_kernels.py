"""Kernels of push_kernels.cu, compiled by CuPy with NVRTC for the GPU at hand.

On an H100 the first launches of a push took 0.7 s on a fresh machine and 0.2 s later, 0.3 times as
long as those of the same kernels in Triton. CuPy keeps what it compiled in our private cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("push_kernels.cu")
THREADS = 256
DIGEST_CHUNK = 1 << 15  # elements
COPY_CHUNK = 1 << 14
DIGESTS = {  # of elements as they are, by their bytes
    1: "digest<u8, false>",
    2: "digest<short, false>",
    4: "digest<int, false>",
    8: "digest<i64, false>",
}
DIGEST_OF_CASTS = "digest<float, true>"  # of float32, as the bfloat16 that a push makes of it
COPIES = {  # by the dtypes of the target and of what is copied
    (torch.bfloat16, torch.float32): "copy<short, float, true>",
    (torch.bfloat16, torch.bfloat16): "copy<short, short, false>",
    (torch.float32, torch.float32): "copy<int, int, false>",
}


def digest_kernel(dtype: torch.dtype, target: torch.dtype) -> str | None:
    """Return the kernel that digests elements cast to `target`, or None where there is none."""
    if (dtype, target) == (torch.float32, torch.bfloat16):
        return DIGEST_OF_CASTS
    return DIGESTS.get(dtype.itemsize) if dtype == target else None


def names() -> list[str]:
    """Return the names of all kernels, as push_kernels.cu is compiled for them."""
    return sorted({*DIGESTS.values(), DIGEST_OF_CASTS, *COPIES.values()})


@cache
def has_cupy() -> bool:
    """Whether CuPy is installed; without it torch's own kernels do the same, with equal bits."""
    return find_spec("cupy") is not None


def launch(
    kernel: str, num_blocks: int, tensors: Sequence[Tensor], numbers: Sequence[int] = ()
) -> None:
    """Queue a kernel on torch's current stream: its arguments are addresses, then numbers."""
    import cupy

    device = tensors[0].device
    stream = torch.cuda.current_stream(device)
    addresses = [one.data_ptr() for one in tensors]
    with torch.cuda.device(device), cupy.cuda.ExternalStream(stream.cuda_stream):
        arguments = tuple(np.int64(one) for one in (*addresses, *numbers))
        _function(kernel)((num_blocks,), (THREADS,), arguments)


@cache
def _function(kernel: str) -> Any:
    return _module().get_function(kernel)


@cache
def _module() -> Any:
    import cupy

    sizes = {"THREADS": THREADS, "DIGEST_CHUNK": DIGEST_CHUNK, "COPY_CHUNK": COPY_CHUNK}
    return cupy.RawModule(
        code=SOURCE.read_text(encoding="utf-8"),
        options=("--std=c++17", *(f"-D{name}={size}" for name, size in sizes.items())),
        name_expressions=names(),
    )
