"""Tensors of a model with weights in few bits: from whole ones, and in an engine's layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from spmd_rl.kernels.low_precision.block_codes import BlockCodes, quantised, torch_dtype
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.formats.coded_weights import coded_shapes, scale_name
from spmd_rl.model.linear import Linear
from spmd_rl.model.spec import ModelSpec

NamedTensors = Iterable[tuple[str, Tensor]]


def hold_codes(model: nn.Module, spec: ModelSpec, weights: WeightFormat) -> None:
    """Have the layers of `model` hold weights in few bits as codes and scales, unset."""
    for name in coded_shapes(spec, weights):
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear)
        layer.hold_codes(FORMATS[weights])


def holds_codes(model: nn.Module) -> bool:
    """Return whether layers of `model` hold codes."""
    return any(isinstance(layer, Linear) and layer.has_codes for layer in model.modules())


def format_written_as(dtype: torch.dtype) -> WeightFormat:
    """Return the format whose codes have this dtype in folders; "full" where no format has it."""
    names = (
        name for name, one in FORMATS.items() if one.folder and torch_dtype(one.code_dtype) == dtype
    )
    return next(names, "full")


def as_codes(
    tensors: NamedTensors, spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with codes and scales in place of weights in few bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        if name in shapes:
            coded = quantised(FORMATS[weights], tensor)
            yield name, coded.codes
            yield scale_name(name), coded.scales
        else:
            yield name, tensor


def as_rounded(
    tensors: NamedTensors, spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with what their codes stand for in place of weights in few bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        if name in shapes:
            tensor = quantised(FORMATS[weights], tensor).decoded(torch.float32)
        yield name, tensor


def coded_weights(
    tensors: dict[str, Tensor], spec: ModelSpec, weights: WeightFormat
) -> dict[str, BlockCodes]:
    """Take the codes and scales out of an engine's `tensors`, and return them by weight."""
    return {
        name: BlockCodes(
            tensors.pop(name), tensors.pop(scale_name(name)), num_columns, FORMATS[weights]
        )
        for name, (_, num_columns) in coded_shapes(spec, weights).items()
        if name in tensors
    }
