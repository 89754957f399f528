"""Portions of a push: what a rank sends at once, through a slab, to the process of its engine.

The slab has two halves, and a portion lies in one of them. The rank fills one half with boxes of
tensors while the other process copies out the boxes of the other. A table says what lies in a half;
an acknowledgement gives the half back.

    rank      fill half 0, table 0   fill half 1, table 1   wait for ack 0, fill half 0, table 2
    process                          copy half 0, ack 0     copy half 1, ack 1

A table is sent when the bytes are in the slab, and an acknowledgement when the copies are done:
both ends wait for their own CUDA stream first, because no stream waits for another process.

Pushes repeat each other. Both ends keep the last table of each portion. Each table has a number.
Where a portion has the boxes that it had before, a message with that number takes the place of the
table, and both ends use the tensors that they made then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spmd_rl.errors import WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab.slab import ALIGN_BYTES, MappedSlab, Slab

MAX_KEPT_TABLES = 4096  # portions with higher numbers have a table in every push


def cut_box(box: Box, item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most `max_bytes` that together are `box`, in the order of its elements.

    Whole rows stay together where they fit; else each row is cut in the same way.
    """
    if box.num_elements * item_bytes <= max_bytes:
        yield box
        return
    if not box.extent or item_bytes > max_bytes:
        raise WeightsError(f"a portion of {max_bytes} bytes has no room for one element")
    row_bytes = box.num_elements // box.extent[0] * item_bytes
    step = max(1, max_bytes // row_bytes)
    for block in box.row_blocks(step):
        if row_bytes <= max_bytes:
            yield block
        else:
            for part in cut_box(Box(box.offset[1:], box.extent[1:]), item_bytes, max_bytes):
                yield Box((block.offset[0], *part.offset), (1, *part.extent))


def half_bytes(slab: Slab | MappedSlab) -> int:
    """Return the size of a portion. Raises: WeightsError when the slab has no room for two."""
    num_bytes = slab.num_bytes // 2 // ALIGN_BYTES * ALIGN_BYTES
    if not num_bytes:
        raise WeightsError(f"a slab of {slab.num_bytes} bytes is too small for two portions")
    return num_bytes


def wait_for_stream(device: torch.device) -> None:
    """Wait until the current CUDA stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
