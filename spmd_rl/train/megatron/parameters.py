"""Parameters of Megatron-core under Hugging Face names: boxes of tensors, as views of memory.

The distributed optimizer cuts a parameter into flat ranges. Such a range is up to three rectangles
of the parameter, and each of them is a box of one tensor or of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from spmd_rl.model.families.megatron import EXPERTS, LAYERS, parts_of
from spmd_rl.model.families.rules import Part
from spmd_rl.model.held.tensor import Seat
from spmd_rl.model.spec import ModelSpec
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box, Dims

Rectangle = tuple[int, int, int, int]  # first row, number of rows, first column, number of columns


@dataclass(frozen=True)
class Parameter:
    """A parameter of a chunk, and the parts of tensors that it holds."""

    name: str
    tensor: Any  # an nn.Parameter, to which Megatron-core adds attributes
    parts: Sequence[Part]

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism places or cuts it, by Megatron-core's mark."""
        return not getattr(self.tensor, "allreduce", True)

    @property
    def is_whole(self) -> bool:
        """Whether it is one whole tensor, of which all ranks of a stage have a copy."""
        return all(part.box.extent == part.shape for part in self.parts) and len(self.parts) == 1

    @property
    def shape(self) -> Dims:
        return tuple(self.tensor.shape)

    def named(self, flat: Tensor, start: int = 0) -> Iterator[tuple[str, LocalTensor]]:
        """Yield the boxes in `flat`, which is this parameter's or of its shape from `start` on."""
        flat = flat.detach().reshape(-1) if flat.dim() > 1 else flat.detach()
        offset = 0
        for rectangle in rectangles(start, start + flat.numel(), prod(self.shape[1:])):
            row, num_rows, column, num_columns = rectangle
            size = num_rows * num_columns
            block = flat[offset : offset + size].view(num_rows, num_columns)
            offset += size
            for part in self.parts:
                first, last = max(row, part.rows[0]), min(row + num_rows, part.rows[1])
                if first < last:
                    box = _box(part, (first, last - first, column, num_columns))
                    memory = block[first - row : last - row]
                    yield part.name, LocalTensor(part.shape, box, memory.view(box.extent))


def parameters_of(chunks: Sequence[Any], spec: ModelSpec, seat: Seat) -> list[Parameter]:
    """Return the parameters of this rank's chunks."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = []
    for chunk in chunks:
        numbers = {
            name: module.layer_number - 1
            for name, module in chunk.named_modules()
            if isinstance(module, TransformerLayer)
        }
        for name, tensor in chunk.named_parameters():
            layer = -1
            if name.startswith(LAYERS):
                layer = numbers[LAYERS + name.removeprefix(LAYERS).split(".")[0]]
            if seat.etp.size > 1 and EXPERTS in name:
                tensor.allreduce = False  # Megatron-core marks those alone that ep places
            parts = parts_of(spec, name, layer, seat)
            found.append(Parameter(f"{layer}:{name}", tensor, parts))
    for parameter in found:
        # Megatron-core counts it once for all ranks along tp, or each rank's own; its own
        # initialization, which we leave out, would say which
        parameter.tensor.tensor_model_parallel = parameter.is_expert or not parameter.is_whole
    return found


def boxes_of(parameters: Sequence[Parameter]) -> list[tuple[str, LocalTensor]]:
    """Return all boxes that a rank computes with. Their memory may sleep later, and wake again."""
    return [named for one in parameters for named in one.named(one.tensor)]


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a matrix that its flat elements `start .. stop` are, in their order.

    They are the end of a row, whole rows, and the beginning of a row.
    """
    row, column = divmod(start, columns)
    if column and start < stop:
        size = min(columns - column, stop - start)
        yield row, 1, column, size
        start, row = start + size, row + 1
    num_rows = (stop - start) // columns
    if num_rows > 0:
        yield row, num_rows, 0, columns
        start, row = start + num_rows * columns, row + num_rows
    if start < stop:
        yield row, 1, 0, stop - start


def _box(part: Part, rectangle: Rectangle) -> Box:
    """Return the box of a rectangle of the parameter, whose rows lie in the part."""
    row, num_rows, column, num_columns = rectangle
    first = part.box.offset[0] + row - part.rows[0]
    if len(part.shape) == 1:
        return Box((first,), (num_rows,))
    return Box((first, part.box.offset[1] + column), (num_rows, num_columns))
