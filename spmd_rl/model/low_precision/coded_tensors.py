"""Tensors of a model with weights in few bits: from whole ones, and in an engine's layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from spmd_rl.kernels.low_precision.code_format import BlockCodes
from spmd_rl.kernels.low_precision.formats import FORMATS
from spmd_rl.model.linear import Linear
from spmd_rl.model.low_precision.coded_weights import WeightFormat, coded_shapes, scale_name
from spmd_rl.model.spec import ModelSpec


def hold_codes(model: nn.Module, spec: ModelSpec, weights: WeightFormat) -> None:
    """Have the layers of `model` hold weights in few bits as codes and scales, unset."""
    for name in coded_shapes(spec, weights):
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear)
        layer.hold_codes(FORMATS[weights])


def holds_codes(model: nn.Module) -> bool:
    """Return whether layers of `model` hold codes."""
    return any(isinstance(one, Linear) and one.has_codes for one in model.modules())


def as_codes(
    tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with codes and scales in place of weights in few bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        if name in shapes:
            coded = FORMATS[weights].quantised(tensor)
            yield name, coded.codes
            yield scale_name(name), coded.scales
        else:
            yield name, tensor


def as_rounded(
    tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with what their codes stand for in place of weights in few bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        if name in shapes:
            tensor = FORMATS[weights].quantised(tensor).decoded(torch.float32)
        yield name, tensor


def coded_weights(
    tensors: dict[str, Tensor], spec: ModelSpec, weights: WeightFormat
) -> dict[str, BlockCodes]:
    """Take the codes and scales out of an engine's `tensors`, and return them by weight."""
    shapes = {name: one for name, one in coded_shapes(spec, weights).items() if name in tensors}
    return {
        name: BlockCodes(
            tensors.pop(name), tensors.pop(scale_name(name)), shape[1], FORMATS[weights]
        )
        for name, shape in shapes.items()
    }
