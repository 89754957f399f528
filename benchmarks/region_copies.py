"""Regions that hold the tensors of a model, and copies of their size beside them, each timed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.shapes import write_config
from spmd_rl.model.read import read_spec
from spmd_rl.offload.region import Contents
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import Receipt

GIB = 1 << 30
COPIED = 0.9  # bar on the rate of a sleep or wake over that of one pinned copy
COPY_TURNS = 5  # behind a first one, which does not count


def shapes(num_bytes: int) -> list[tuple[int, ...]]:
    """Return the shapes of Qwen3-0.6B's parameters, repeated until they are `num_bytes` in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        write_config("0.6B", Path(folder))
        spec = read_spec(folder)
    model = list(spec.parameter_shapes().values())
    chosen: list[tuple[int, ...]] = []
    left = num_bytes // 4
    while left > 0:
        for shape in model:
            size = torch.Size(shape).numel()
            if size > left:
                chosen.append((left,))
                return chosen
            chosen.append(shape)
            left -= size
            if not left:
                break
    return chosen


def tensors_in(
    regions: Regions,
    tag: str,
    num_bytes: int,
    device: torch.device,
    contents: Contents = "save",
    as_one: bool = False,
) -> list[Tensor]:
    """Make a region of random tensors. `as_one` says to cut them from one segment."""
    region = regions.torch_region(tag, contents)
    sizes = shapes(num_bytes)
    with region.allocating(num_bytes + 512 * len(sizes) if as_one else 0):
        made = [torch.empty(shape, device=device) for shape in sizes]
    for tensor in made:
        tensor.normal_()
    region.hold(lambda: made)
    return made


def timed(call: Callable[[], Receipt]) -> tuple[Receipt, float]:
    """Return the receipt of a sleep or wake, and the seconds of the whole call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    receipt = call()
    return receipt, time.perf_counter() - began


def receipt_rate(receipt: Receipt) -> float:
    """Return the rate of the copies of a sleep or wake, in GB/s."""
    return receipt.copied_bytes / receipt.copy_s / 1e9


def copy_rate(target: Tensor, source: Tensor) -> float:
    """Return the rate of one copy between pinned memory and the GPU, in GB/s."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return source.nbytes / (time.perf_counter() - began) / 1e9
