"""Sharing: what ranks of FSDP2 share of a model beside its shards."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import RoleContext
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
    def of(cls, spec: ModelSpec, context: RoleContext, dispatcher: EpDispatcherKind) -> Sharing:
        """Return what the axes of a role say, which were checked.

        Ranks: all of the role. Raises: ConfigError where a dispatcher of this kind cannot run.
        """
        sizes = {axis: size_of(context.placement.axes, axis) for axis in ("ep", "cp", "tp")}
        return cls(
            ExpertShards(context, dispatcher) if sizes["ep"] > 1 else None,
            SequenceShards(context.axis_group(("cp",))) if sizes["cp"] > 1 else None,
            TensorShards(spec, context) if sizes["tp"] > 1 else None,
        )

    @property
    def part(self) -> ModelPart:
        """The part of the model that this rank has."""
        return WHOLE if self.tensors is None else self.tensors.part


ALONE = Sharing()
