"""HeldTensor: what one rank has of one parameter, for any rank of any role. No torch.

Ranks that share a model have different parts of a matrix along `tp`, and different experts along
`ep`. FSDP2 shards each part by rows, among further ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.weights.plan.layout import Box, chunk_of_box, range_box

Axis = Literal["tp", "ep", ""]


@dataclass(frozen=True)
class Along:
    """A rank's place along an axis."""

    index: int = 0
    size: int = 1

    def of(self, num_rows: int) -> tuple[int, int]:
        """Return the rank's range of rows, whose number is a multiple of the ranks."""
        part = num_rows // self.size
        return part * self.index, part * (self.index + 1)


ONE = Along()


@dataclass(frozen=True)
class Seat:
    """The place of a rank among those that hold a model.

    Megatron-core cuts within an expert along `etp`, and all else along `tp`. FSDP2 shards experts
    along `expert_shards`, and all else along `shards`. As many ranks as `replicas` says have equal
    shards of all but experts, of which there is one copy.
    """

    tp: Along = ONE
    ep: Along = ONE
    shards: Along = ONE
    expert_shards: Along = ONE
    replicas: int = 1
    etp: Along = ONE


class HeldTensor(NamedTuple):
    """One parameter as one rank has it.

    Ranks along `axis` have different parts of it; where it is "", each has all. An expert is whole
    on its `owner` along ep. `shards` is the rank's place among those that shard its part, and
    `copies` how many ranks have the same shard. A vocabulary is padded to a multiple of `padding`
    rows.
    """

    spec: TensorSpec
    axis: Axis = ""
    along: Along = ONE
    owner: int = 0
    shards: Along = ONE
    copies: int = 1
    padding: int = 1

    def part_of(self, index: int) -> Box:
        """Return the part of the rank `index` along the axis; it may be empty."""
        if self.axis == "tp":
            return part_box(self.spec, Along(index, self.along.size), self.padding)
        num_rows = self.spec.shape[0] if self.axis == "" or index == self.owner else 0
        return range_box(self.spec.shape, 0, 0, num_rows)

    @property
    def part(self) -> Box:
        """What this rank and those that shard it have together."""
        return self.part_of(self.along.index)

    @property
    def box(self) -> Box:
        """This rank's rows of the part."""
        return chunk_of_box(self.part, self.shards.index, self.shards.size)

    @property
    def is_here(self) -> bool:
        """Whether this rank has a part, of which it may have no row."""
        return self.axis != "ep" or self.along.index == self.owner


def part_box(tensor: TensorSpec, along: Along, padding: int = 1) -> Box:
    """Return the box of a rank where ranks divide a tensor as its cut says; all of it without one.

    A vocabulary is padded to a multiple of `padding` rows first, and then split evenly. So a box
    may be short, or empty.
    """
    shape, cut = tensor.shape, tensor.cut
    if cut is None:
        return range_box(shape, 0, 0, shape[0])
    if not cut.is_padded:
        return range_box(shape, cut.dim, *cut.part(shape[cut.dim], along.index, along.size))
    num_rows = -(-shape[cut.dim] // padding) * padding
    rows = -(-num_rows // along.size)
    return range_box(shape, cut.dim, along.index * rows, (along.index + 1) * rows)
