"""SequenceShards: the rows of a micro-batch that a rank of FSDP2 has where several share its
sequences (axis cp).

All but attention is a function of a token's row, so a rank computes its own rows alone, and the
scores of these. Then the ranks exchange the scores: each computes the loss of all, and its backward
pass the gradient of its own rows. FSDP adds these gradients up, as those of other data.

Shape letters: M scored tokens of a micro-batch, m of them on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.attention.shared_tokens import SharedTokens
from spmd_rl.train.backend import Outputs
from spmd_rl.train.microbatch import MicroBatch


class SequenceShards:
    """Cuts micro-batches over the ranks of `group`, which have the same ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = group.size()

    def part(self, micro: MicroBatch) -> OwnRows:
        """Return this rank's part of a micro-batch. The host waits for the device."""
        shared = SharedTokens(len(micro.tokens), self._group)
        size = self.size
        chosen = (micro.rows % size == self._group.rank()).nonzero()[:, 0]
        scored = micro.scored(chosen)
        own = replace(
            scored,
            tokens=shared.own_rows(micro.tokens),
            positions=shared.own_rows(micro.positions),
            rows=scored.rows // size,
            experts=None if micro.experts is None else shared.own(micro.experts),
            shared=shared,
        )
        return OwnRows(own, chosen, micro.num_scored, self._group)


@dataclass(frozen=True)
class OwnRows:
    """A rank's part of a micro-batch, of whose `num_scored` tokens it scores those in `chosen` [m].

    All ranks of the group call each method together, and wait for each other.
    """

    micro: MicroBatch
    chosen: Tensor
    num_scored: int
    group: dist.ProcessGroup

    def outputs(self, own: Outputs) -> Outputs:
        """Return the outputs for all scored tokens. The counts of experts stay those of the rows.

        Shape: tensors are [m] or [m, K]; returns [M] or [M, K].
        """
        tensors: dict[str, Any] = {
            name: self.joined(one) for name, one in vars(own).items() if isinstance(one, Tensor)
        }
        return replace(own, **tensors)

    def joined(self, own: Tensor) -> Tensor:
        """Return a tensor for all scored tokens from those of each rank, in fp32 or int32."""
        found: Tensor = _Joined.apply(own, self)
        return found


class _Joined(torch.autograd.Function):
    """Rows of all ranks in their places. Each rank has the gradient of all, and keeps its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: OwnRows) -> Tensor:
        ctx.chosen = rows.chosen
        found = own.new_zeros(rows.num_scored, *own.shape[1:])
        found[rows.chosen] = own
        # as integers: a sum with zeros then has the same bits, also those of -0.0
        dist.all_reduce(found.view(torch.int32), group=rows.group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.chosen], None
