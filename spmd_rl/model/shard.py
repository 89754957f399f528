"""Which box of a tensor a rank has, where ranks share it as its cut says."""

from __future__ import annotations

from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.weights.plan.layout import Box, range_box


def shard_box(tensor: TensorSpec, part: int, num_parts: int, padding: int = 1) -> Box:
    """Return the box that part `part` of `num_parts` has; the whole tensor if it is not cut.

    A vocabulary is padded to a multiple of `padding` rows first, and then split evenly. So a box
    may be short, or empty.
    """
    shape, cut = tensor.shape, tensor.cut
    if cut is None:
        return range_box(shape, 0, 0, shape[0])
    if not cut.is_padded:
        return range_box(shape, cut.dim, *cut.part(shape[cut.dim], part, num_parts))
    num_rows = -(-shape[cut.dim] // padding) * padding
    rows = -(-num_rows // num_parts)
    return range_box(shape, cut.dim, part * rows, (part + 1) * rows)
