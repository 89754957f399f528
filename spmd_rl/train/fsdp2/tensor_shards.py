"""TensorShards: the part of a model that a rank of FSDP2 has where several share it (axis tp)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.mesh.axes import DATA
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
        self.role_group = context.axis_group((*DATA, "cp", "tp"))
        self.size, rank = self._group.size(), self._group.rank()
        self._exchange = TorchExchange(self._group)
        self.part = ModelPart(rank, self.size, self._exchange, trains=True)
        self.shapes: Mapping[str, Dims] = spec.parameter_shapes()
        self._boxes = [
            ModelPart(index, self.size, trains=True).boxes(spec) for index in range(self.size)
        ]
        self.boxes: Mapping[str, Box] = self._boxes[rank]
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
        """Sum the gradients of what each rank has whole, in fp32: they are of its heads or rows.

        Ranks: all of the group. Blocks: until each has called.
        """
        found = [gradients[name] for name in sorted(self.uncut & gradients.keys())]
        if not found:
            return
        flat = torch.cat([one.flatten() for one in found]).unsqueeze(0)
        total = self._exchange.sum(flat, None, torch.float32)[0]
        for one, part in zip(found, total.split([one.numel() for one in found]), strict=True):
            one.copy_(part.view_as(one))

    def counted(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients that this rank counts of all in the group, each once.

        The first rank counts what each has whole; there, the others have empty tensors.
        """
        is_first = self.part.index == 0
        return [
            one if is_first or name not in self.uncut else one[:0]
            for name, one in gradients.items()
        ]
