"""Write of new keys and values into their slots of a paged cache."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import KvCoding, encode_kv, of_both


class KvSlots(NamedTuple):
    """The slots of one layer's cache that new keys and values go to; shapes as in `write_kv`."""

    keys: Tensor
    values: Tensor
    slots: Tensor


def write_kv(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    coding: KvCoding | None = None,
) -> None:
    """Write the first T rows of k and v into slots; a negative slot writes nothing.

    Slot = page * page_size + offset. With `coding`, codes of a byte are written and counted.
    Shape: keys and values [num_pages, page_size, K, D], contiguous; slots [T] int64; k and v [T',
    K, D], which may be slices of one tensor.
    """
    if keys.is_cuda:
        from spmd_rl.kernels.rowwise.kv_write_triton import write_rows

        write_rows(keys, values, slots, k, v, coding)
        return
    used = slots >= 0
    k, v = k[: len(slots)][used], v[: len(slots)][used]
    if coding is not None:
        k, v = codes_of(k, v, coding)
    for pages, new in ((keys, k), (values, v)):
        pages.flatten(0, 1)[slots[used]] = new


def codes_of(k: Tensor, v: Tensor, coding: KvCoding) -> tuple[Tensor, Tensor]:
    """Return the codes of keys and values that are to be stored, and count them."""
    stored, clipped = coding.counts
    codes = of_both(partial(encode_kv, clipped=clipped), k, v, coding.exponents)
    stored += k.numel() + (v.numel() if v.shape == k.shape else 0)
    return codes
