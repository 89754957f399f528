"""GatheredTensors: whole tensors from the boxes that the ranks of a role hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.backend import NamedTensors, pieces_of_ranks
from spmd_rl.weights.plan.layout import Box, Dims

WEIGHTS = "weights"


class GatheredTensors:
    """Gathers one tensor at a time. The boxes of all ranks are exchanged at the first of them."""

    def __init__(self, context: RoleContext, device: torch.device) -> None:
        self._context, self._device = context, device
        self._shapes: dict[str, Dims] = {}
        self._owners: dict[str, dict[Box, int]] = {}  # for each box the first rank that holds it

    def whole(self, name: str, own: NamedTensors) -> Tensor:
        """Return a whole tensor on every rank. `own` are all boxes of this rank.

        Ranks: all of the role. Blocks: until each box has been sent.
        """
        if not self._owners:
            self._exchange(own)
        held = {tensor.box: tensor.local for other, tensor in own if other == name}
        whole = torch.empty(self._shapes[name], device=self._device)
        for box, owner in self._owners[name].items():
            part = torch.empty(box.extent, device=self._device)
            if owner == self._context.rank:
                part.copy_(held[box])
            dist.broadcast(part, group=self._context.group, group_src=owner)
            whole[box.index] = part
        return whole

    def _exchange(self, own: NamedTensors) -> None:
        for rank, pieces in enumerate(pieces_of_ranks({WEIGHTS: own}, self._context)):
            for piece in pieces[WEIGHTS]:
                self._shapes[piece.name] = piece.shape
                self._owners.setdefault(piece.name, {}).setdefault(piece.box, rank)
