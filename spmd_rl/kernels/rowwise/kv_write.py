"""Write of new keys and values into their slots of a paged cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KvSlots(NamedTuple):
    """The slots of one layer's cache that new keys and values go to; shapes as in `write_kv`."""

    keys: Tensor
    values: Tensor
    slots: Tensor


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the first T rows of k and v into slots; a negative slot writes nothing.

    Slot = page * page_size + offset.
    Shape: keys and values [num_pages, page_size, K, D], contiguous; slots [T] int64; k and v [T',
    K, D], which may be slices of one tensor.
    """
    if keys.is_cuda:
        from spmd_rl.kernels.rowwise.kv_write_triton import write_rows

        write_rows(keys, values, slots, k, v)
        return
    used = slots >= 0
    for pages, new in ((keys, k), (values, v)):
        pages.flatten(0, 1)[slots[used]] = new[: len(slots)][used]
