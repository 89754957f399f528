"""CodedMasters: sharded master weights that compute as the numbers that their codes stand for.

The scales of a weight are found once a version: a shard has the maxima of its rows, and ranks take
the largest. A maximum does not depend on an order, so all numbers of ranks have the same scales.
Where FSDP gathers a weight, its shard is rounded in place of being cast. A gradient goes to the
master weight as if nothing had been rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from spmd_rl.kernels.low_precision.block_codes import num_blocks
from spmd_rl.kernels.low_precision.e4m3_blocks import block_maxima, block_scales, rounded
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors

Gathered = tuple[tuple[Tensor, ...], None]


class CodedMasters:
    """This rank's rows of the weights that are in 8 bits, and the scales of all their rows.

    `shards` are the rows, whose memory stays where it is. `group` has the ranks that share them.
    FSDP gathers them for its `parameters` as `dtype`, rounded.
    """

    def __init__(
        self,
        shards: LocalTensors,
        group: ProcessGroup,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.shards = shards
        self._group = group
        self.scales = {
            name: shard.local.new_ones(num_blocks(shard.shape)) for name, shard in shards.items()
        }
        self._attach(parameters, dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales of the weights as they are now, in the same memory.

        Ranks: all that share the weights.
        """
        maxima = [
            block_maxima(one.local, one.shape[0], one.box.offset[0]).flatten()
            for one in self.shards.values()
        ]
        found = torch.cat(maxima)
        if self._group.size() > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        parts = block_scales(found).split([len(one) for one in maxima])
        for scales, part in zip(self.scales.values(), parts, strict=True):
            scales.copy_(part.view_as(scales))

    def _attach(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Set FSDP's own hooks of a sharded tensor, which it looks up by their names."""
        for name, shard in self.shards.items():
            parameter = parameters[name]
            assert isinstance(parameter, DTensor), f"FSDP leaves {name} alone"
            num_rows = -(-shard.shape[0] // self._group.size())
            local = cast(Any, parameter._local_tensor)
            local.fsdp_pre_all_gather = _rounding(shard, self.scales[name], num_rows, dtype)
            local.fsdp_post_all_gather = _as_gathered


def _rounding(
    shard: LocalTensor, scales: Tensor, num_rows: int, dtype: torch.dtype
) -> Callable[..., Gathered]:
    """Return FSDP's hook that makes what is gathered: `num_rows` rows of each rank."""

    def before(
        mesh: object, outer_size: object, outer_stride: object, module: object, policy: object
    ) -> Gathered:
        rows = rounded(shard.local.detach(), scales, dtype, shard.box.offset[0])
        missing = num_rows - len(rows)
        return (F.pad(rows, (0, 0, 0, missing)) if missing else rows,), None

    return before


def _as_gathered(
    outputs: tuple[Tensor, ...], metadata: object, dtype: torch.dtype, *, out: object = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered rows as the weight, which uses their memory from then on."""
    return None if out is not None else (outputs[0], ())
