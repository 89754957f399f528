"""Sharing: what ranks of FSDP2 share of a model beside its shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.held.tensor import Along, HeldTensor, Seat
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import EpDispatcherKind
from spmd_rl.train.fsdp2.expert_shards import ExpertShards
from spmd_rl.train.fsdp2.sequence_shards import SequenceShards
from spmd_rl.train.fsdp2.tensor_shards import TensorShards


@dataclass(frozen=True)
class Sharing:
    """The experts, the sequences and the matrices that ranks share; None for what they do not."""

    experts: ExpertShards | None = None
    sequences: SequenceShards | None = None
    tensors: TensorShards | None = None

    @classmethod
    def of(
        cls, context: RoleContext, spec: ModelSpec, dispatcher: EpDispatcherKind = "torch"
    ) -> Sharing:
        """Return what the axes of a role say, which were checked.

        Where ranks share matrices, each sends its own rows to experts, which are then sharded over
        all ranks that have them.

        Ranks: all of the role. Raises: ConfigError where a dispatcher of this kind cannot run.
        """
        sizes = {axis: size_of(context.placement.axes, axis) for axis in ("ep", "cp", "tp")}
        is_apart = context.placement.sharding_of_experts(spec.num_experts > 0)
        return cls(
            ExpertShards(context, dispatcher) if is_apart else None,
            SequenceShards(context.axis_group(("cp",))) if sizes["cp"] > 1 else None,
            TensorShards(context) if sizes["tp"] > 1 else None,
        )

    @property
    def part(self) -> ModelPart:
        """The part of the model that this rank has."""
        return WHOLE if self.tensors is None else self.tensors.part

    def seat(self, shards: Along, replicas: int) -> Seat:
        """Return the place of this rank among those that hold the model."""
        tp, experts = Along(self.part.index, self.part.count), self.experts
        if experts is None:
            return Seat(tp, shards=shards, replicas=replicas)
        ep = Along(experts.group.rank(), experts.group.size())
        return Seat(tp, ep, shards, Along(experts.shard, experts.num_shards), replicas)

    def whole(self, held: HeldTensor, part: Tensor | None, device: torch.device) -> Tensor:
        """Return a whole parameter on every rank. `part` is what this rank and those that shard it
        have; None for an expert of another rank.

        Ranks: all of the role. Blocks: until each has called.
        """
        if held.axis == "":
            assert part is not None
            return part
        shared = self.experts if held.axis == "ep" else self.tensors
        assert shared is not None
        return _joined(held, part, shared.group, device)


def _joined(
    held: HeldTensor, part: Tensor | None, group: ProcessGroup, device: torch.device
) -> Tensor:
    """Return a parameter put together of the parts of all ranks of a group."""
    whole = torch.empty(held.spec.shape, device=device)
    for index in range(held.along.size):
        box = held.part_of(index)
        if not box.num_elements:
            continue
        if part is not None and index == held.along.index:
            values = part.detach().contiguous()
        else:
            values = torch.empty(box.extent, device=device)
        dist.broadcast(values, group=group, group_src=index)
        if box.extent == held.spec.shape:
            return values
        whole[tuple(map(slice, box.offset, box.end))] = values
    return whole


ALONE = Sharing()
