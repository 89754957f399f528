"""CodedMasters: sharded master weights that compute as the numbers that their codes stand for.

The scales of a weight are found once a version: a shard has the maxima of its rows, and ranks take
the largest. A maximum does not depend on an order, so all numbers of ranks have the same scales.
Where FSDP gathers a weight, its shard is rounded in place of being cast. An expert that one rank
has whole is rounded by its layer. A gradient goes to the master weight as if nothing had been
rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.layers.moe import is_of_expert
from spmd_rl.model.layers.moe_module import mixtures
from spmd_rl.model.linear import Linear
from spmd_rl.types.code_format import CodeFormat
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box, Dims

Gathered = tuple[tuple[Tensor, ...], None]

STACKED_ELEMENTS = 1 << 24  # of the shards that are copied side by side


class SharedMasters(NamedTuple):
    """This rank's rows of master weights that the ranks of `group` shard.

    Their memory stays where it is. They are gathered as `dtype`.
    """

    shards: LocalTensors
    group: ProcessGroup
    dtype: torch.dtype


class CodedMasters:
    """This rank's rows of the weights of `model` that are in few bits, and the scales of all rows.

    Scales are kept in float32, and a push brings them in the dtype of the format.
    """

    def __init__(
        self, parts: Iterable[SharedMasters], model: nn.Module, code_format: CodeFormat
    ) -> None:
        self.format = code_format
        self._parts = [part for part in parts if part.shards]
        self.shards = {name: one for part in self._parts for name, one in part.shards.items()}
        self.scales: dict[str, Tensor] = {}
        self._rounded: list[RoundedShards] = []
        self._flat = [self._with_scales(part.shards) for part in self._parts]
        for part in self._parts:
            self._attach(part, model)

    def _with_scales(self, shards: LocalTensors) -> Tensor:
        """Give all weights of a part scales, side by side in the memory that is returned."""
        shapes = {name: self.format.scale_shape(one.shape) for name, one in shards.items()}
        sizes = [rows * columns for rows, columns in shapes.values()]
        flat = next(iter(shards.values())).local.new_ones(sum(sizes), requires_grad=False)
        for (name, shape), scales in zip(shapes.items(), flat.split(sizes), strict=True):
            self.scales[name] = scales.view(shape)
        return flat

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales of the weights as they are now, in the same memory.

        Ranks: all that share the weights.
        """
        for part, flat in zip(self._parts, self._flat, strict=True):
            maxima = self._maxima(part.shards)
            found = torch.cat([maxima[name].flatten() for name in part.shards])
            if part.group.size() > 1:
                dist.all_reduce(found, dist.ReduceOp.MAX, part.group)
            flat.copy_(self.format.scales_of(found))
        for one in self._rounded:
            one.forget()

    def _maxima(self, shards: LocalTensors) -> dict[str, Tensor]:
        """Return the largest magnitude in each block of each weight, as far as its shard has it.

        Small weights of one shape, such as those of experts, are looked at together.
        """
        alike = defaultdict[tuple[Dims, Box], list[str]](list)
        for name, shard in shards.items():
            alike[shard.shape, shard.box].append(name)
        found = dict[str, Tensor]()
        for (shape, box), names in alike.items():
            at_once = max(1, STACKED_ELEMENTS // max(1, box.num_elements))
            for first in range(0, len(names), at_once):
                some = names[first : first + at_once]
                tensors = [shards[name].local.detach() for name in some]
                values = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
                of_some = block_codes.maxima(self.format, values, shape[0], box.offset[0])
                found |= zip(some, of_some, strict=True)
        return found

    def _attach(self, part: SharedMasters, model: nn.Module) -> None:
        """Set FSDP's own hooks of a sharded tensor, which it looks up by their names.

        A layer whose weight is whole gets the scales.
        """
        mixtures_of = _mixtures_of(model)
        together = defaultdict[tuple[object, Dims, Box], dict[str, CodedShard]](dict)
        for name, shard in part.shards.items():
            layer, scales = self._layer(name, model), self.scales[name]
            if isinstance(layer.weight, DTensor):
                unit = mixtures_of.get(layer, name)
                together[unit, shard.shape, shard.box][name] = CodedShard(shard, scales)
            else:
                assert is_of_expert(name), f"FSDP leaves {name} alone"
                layer.format, layer.master_scales = self.format, scales
        for (_, shape, _), shards in together.items():
            num_rows = -(-shape[0] // part.group.size())
            rounded = RoundedShards(self.format, shards, num_rows, part.dtype)
            self._rounded.append(rounded)
            for name in shards:
                local = cast(Any, self._layer(name, model).weight)._local_tensor
                local.fsdp_pre_all_gather = rounded.hook(name)
                local.fsdp_post_all_gather = as_gathered

    @staticmethod
    def _layer(name: str, model: nn.Module) -> Linear:
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear)
        return layer


def _mixtures_of(model: nn.Module) -> dict[nn.Module, int]:
    """Return the number of the mixture that each layer of an expert belongs to."""
    return {
        layer: number
        for number, mixture in enumerate(mixtures(model))
        for layer in mixture.experts.modules()
    }


class CodedShard(NamedTuple):
    """This rank's rows of a master weight, and the scales of all rows."""

    shard: LocalTensor
    scales: Tensor


class RoundedShards:
    """Shards of weights of one shape that one unit gathers, as the experts of a layer are.

    They are rounded together when the first is asked for: on a GPU, by one launch. Each rank gives
    `num_rows` rows of `dtype`. FSDP's hooks take them, each once in a gathering. Rounded rows wait
    for their hook, so `forget` must be called whenever the weights have changed: a gathering may
    have been broken off.
    """

    def __init__(
        self,
        code_format: CodeFormat,
        shards: Mapping[str, CodedShard],
        num_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self._format, self._shards = code_format, dict(shards)
        self._num_rows, self._dtype = num_rows, dtype
        self._ready: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Drop rows that no hook has taken."""
        self._ready.clear()

    def hook(self, name: str) -> Callable[..., Gathered]:
        """Return FSDP's hook that makes what is gathered of the weight `name`."""

        def before(
            mesh: object, outer_size: object, outer_stride: object, module: object, policy: object
        ) -> Gathered:
            if name not in self._ready:
                self._ready = dict(zip(self._shards, self._rounded().unbind(), strict=True))
            return (self._ready.pop(name),), None

        return before

    @torch.no_grad()
    def _rounded(self) -> Tensor:
        """Return the rows of all weights, in their order. Shape: [weights, num_rows, K]."""
        shards, scales = zip(*self._shards.values(), strict=True)
        values, first_row = [one.local.detach() for one in shards], shards[0].box.offset[0]
        return block_codes.rounded_each(
            self._format, values, scales, self._dtype, first_row, self._num_rows
        )


def as_gathered(
    outputs: tuple[Tensor, ...], metadata: object, dtype: torch.dtype, *, out: object = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered rows as the weight, which uses their memory from then on."""
    return None if out is not None else (outputs[0], ())
