"""Tensors of a model whose weights are in 8 bits: from whole weights, and in an engine's layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from spmd_rl.kernels.low_precision.block_codes import CODE
from spmd_rl.kernels.low_precision.e4m3_blocks import decode, quantised
from spmd_rl.model.linear import Linear
from spmd_rl.model.low_precision.coded_weights import WeightFormat, coded_shapes, scale_name
from spmd_rl.model.spec import ModelSpec


def hold_codes(model: nn.Module, spec: ModelSpec, weights: WeightFormat) -> None:
    """Have the layers of `model` hold the weights that are in 8 bits as codes and scales, unset."""
    for name in coded_shapes(spec, weights):
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear)
        layer.hold_codes()


def holds_codes(model: nn.Module) -> bool:
    """Return whether layers of `model` hold codes."""
    return any(one.dtype == CODE for one in model.parameters())


def as_codes(
    tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with codes and scales in place of the weights that are in 8 bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        if name in shapes:
            codes, scales = quantised(tensor)
            yield name, codes
            yield scale_name(name), scales
        else:
            yield name, tensor


def as_rounded(
    tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec, weights: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, with what their codes stand for in place of weights in 8 bits."""
    shapes = coded_shapes(spec, weights)
    for name, tensor in tensors:
        is_coded = name in shapes
        yield name, decode(*quantised(tensor), torch.float32) if is_coded else tensor
