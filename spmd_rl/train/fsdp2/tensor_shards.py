"""TensorShards: the part of a model that a rank of FSDP2 has where several share it (axis tp)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import ModelSpec
from spmd_rl.weights.plan.layout import Box, Dims


class TensorShards:
    """Which box of each parameter this rank has before FSDP shards it.

    Each rank has whole what has no cut, such as norms, which FSDP shards on each alike.
    """

    def __init__(self, spec: ModelSpec, context: RoleContext) -> None:
        self._group = context.axis_group(("tp",))
        self.size, rank = self._group.size(), self._group.rank()
        self._exchange = TorchExchange(self._group)
        self.part = ModelPart(rank, self.size, self._exchange, cuts_embedding=True)
        self.shapes: Mapping[str, Dims] = spec.parameter_shapes()
        self._boxes = [
            ModelPart(index, self.size, cuts_embedding=True).boxes(spec)
            for index in range(self.size)
        ]
        self.boxes: Mapping[str, Box] = self._boxes[rank]
        self._by_heads = self.part.shared_by_heads(spec)
        self.uncut = frozenset(one.name for one in spec.parameters() if one.cut is None)

    def whole(self, name: str, own: Tensor, device: torch.device) -> Tensor:
        """Return a parameter of the whole model. `own` is this rank's box.

        Ranks: all of the group. Blocks: until each has called.
        """
        if name in self.uncut:
            return own
        found = torch.empty(self.shapes[name], device=device)
        for rank, boxes in enumerate(self._boxes):
            box = boxes[name]
            part = own.detach().contiguous() if rank == self.part.index else None
            part = torch.empty(box.extent, device=device) if part is None else part
            dist.broadcast(part, group=self._group, group_src=rank)
            found[tuple(map(slice, box.offset, box.end))] = part
        return found

    def sum_uncut(self, gradients: Mapping[str, Tensor]) -> None:
        """Have all ranks agree on the gradients of what each has whole, in fp32.

        Those of norms of heads are summed over ranks. Each has all of the others, perhaps with
        other sums over FSDP's ranks: then their mean keeps the weights of all ranks alike.
        Ranks: all of the group. Blocks: until each has called.
        """
        names = sorted(self.uncut & gradients.keys())
        if not names:
            return
        parts = [
            gradients[name].flatten() / (1 if name in self._by_heads else self.size)
            for name in names
        ]
        total = self._exchange.sum(torch.cat(parts).unsqueeze(0), None, torch.float32)[0]
        for name, one in zip(names, total.split([len(part) for part in parts]), strict=True):
            gradients[name].copy_(one.view_as(gradients[name]))
