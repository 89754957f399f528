"""TensorShards: the part of a model that a rank of FSDP2 has where several share it (axis tp)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.parts.part import ModelPart


class TensorShards:
    """The ranks that share each matrix, and the exchange between them.

    Each rank has whole what has no cut, such as norms, which FSDP shards on each alike.
    """

    def __init__(self, context: RoleContext) -> None:
        self.group = context.axis_group(("tp",))
        self.role_group = context.axis_group((*DATA, "cp", "tp"))
        self._exchange = TorchExchange(self.group)
        self.part = ModelPart(self.group.rank(), self.group.size(), self._exchange, trains=True)

    def sum_uncut(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients of what each rank has whole, in fp32: they are of its heads or rows.

        Ranks: all of the group, with equal shapes in the same order. Blocks: until each has called.
        """
        if not gradients:
            return
        flat = torch.cat([one.flatten() for one in gradients]).unsqueeze(0)
        total = self._exchange.sum(flat, None, torch.float32)[0]
        sizes = [one.numel() for one in gradients]
        for gradient, values in zip(gradients, total.split(sizes), strict=True):
            gradient.copy_(values.view_as(gradient))

    def counted(self, gradients: Mapping[str, Tensor], uncut: Container[str]) -> list[Tensor]:
        """Return the gradients that this rank counts of all in the group, each once.

        The first rank counts what each has whole; there, the others have empty tensors.
        """
        is_first = self.part.index == 0
        return [
            gradient if is_first or name not in uncut else gradient[:0]
            for name, gradient in gradients.items()
        ]
