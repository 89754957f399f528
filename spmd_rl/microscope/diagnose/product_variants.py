"""Variants of a product with a weight: of our layers, of the libraries and of common faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import linear, linear_fp32, pad_rows
from spmd_rl.kernels.linear.row_shards import shared_logits
from spmd_rl.kernels.linear.shard_exchange import rounded
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.microscope.diagnose.variant_inputs import Variant, VariantInputs
from spmd_rl.model.linear import Linear, merged
from spmd_rl.model.parts.part import ROW_SHARDS, vocab_part_rows


def products(op: str = "") -> list[Variant]:
    """Return the variants of a product with a weight; of the head's, if `op` is "logits"."""
    others = _OF_HEAD if op == "logits" else _OF_LAYER
    parts = [(f"K summed in {n} parts", partial(_in_parts, n)) for n in (2, 3, 4, 8)]
    return [*others, *_OF_LIBRARY, *parts, *_WITHOUT]


def _product(product: Callable[..., Tensor], inputs: VariantInputs) -> Tensor:
    return _adapted(inputs, _plain(product, inputs))


def _plain(product: Callable[..., Tensor], inputs: VariantInputs) -> Tensor:
    """Return the product without an adapter."""
    return product(inputs.x[0], _weight(inputs), getattr(inputs.module, "bias", None))


def _adapted(inputs: VariantInputs, out: Tensor) -> Tensor:
    """Return a product, plus what the adapter gives if the layer has one."""
    module = inputs.module
    return module.with_adapter(inputs.x[0], out) if isinstance(module, Linear) else out


def _weight(inputs: VariantInputs) -> Tensor:
    """Return the weight of the op's module, or what its codes stand for."""
    module = inputs.module
    if isinstance(module, Linear) and module.has_codes:
        return module.codes.decoded(inputs.x[0].dtype)
    weight: Tensor = module.weight
    return weight


def _contract(inputs: VariantInputs) -> Tensor:
    """Return what our layer gives with its adapter and in its parts, without a planted fault."""
    if isinstance(inputs.module, Linear):
        return Linear.forward(inputs.module, inputs.x[0])
    return _product(linear, inputs)


def _merged_product(product: Callable[..., Tensor], inputs: VariantInputs) -> Tensor:
    module, x, weight = inputs.module, inputs.x[0], _weight(inputs)
    if isinstance(module, Linear) and (adapter := module.adapter) is not None:
        a, b = (one.float() for one in adapter)
        weight = merged(weight.to(x.dtype), a, b, module.scale).to(x.dtype)
    return product(x, weight, getattr(module, "bias", None))


def _head(inputs: VariantInputs) -> Tensor:
    num_parts = inputs.spec.row_shards
    if num_parts == 1:
        return linear_fp32(inputs.x[0], inputs.module.weight)
    rows = vocab_part_rows(inputs.spec, num_parts)
    return shared_logits(inputs.x[0], inputs.module.weight, rows)


def _rounded_head(inputs: VariantInputs) -> Tensor:
    return _head(inputs).bfloat16()


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(pad_rows(x), weight, bias)[: len(x)]


def _in_parts(count: int, inputs: VariantInputs) -> Tensor:
    x, weight = inputs.x[0], _weight(inputs)
    parts = zip(x.tensor_split(count, 1), weight.tensor_split(count, 1), strict=True)
    total = torch.stack([linear_fp32(part, columns) for part, columns in parts]).sum(0)
    return _summed(inputs, total)


def _without(count: int, left_out: int, inputs: VariantInputs) -> Tensor:
    """Return the sum of ranks' parts but for one of them."""
    x, weight = inputs.x[0], _weight(inputs)
    pairs = zip(x.tensor_split(count, 1), weight.tensor_split(count, 1), strict=True)
    parts = [linear_fp32(dense(part), dense(columns)) for part, columns in pairs]
    parts[left_out] = torch.zeros_like(parts[left_out])
    return _summed(inputs, sum_neighbours(parts))


def _summed(inputs: VariantInputs, total: Tensor) -> Tensor:
    bias = getattr(inputs.module, "bias", None)
    return _adapted(inputs, rounded(total, bias, inputs.x[0].dtype))


_OF_LAYER: list[Variant] = [
    ("the contract's product", _contract),
    ("the contract's product without the adapter", partial(_plain, linear)),
    ("the adapter merged into the weight", partial(_merged_product, linear)),
    ("the library's product, the adapter merged", partial(_merged_product, F.linear)),
]
_OF_HEAD: list[Variant] = [
    ("the contract's product", _head),
    ("the contract's product, rounded to bfloat16", _rounded_head),
]
_OF_LIBRARY: list[Variant] = [
    ("the library's product of that many rows", partial(_product, F.linear)),
    ("the library's product, rows padded", partial(_product, _padded)),
]
_WITHOUT: list[Variant] = [
    (f"the sum of {count} parts without part {part + 1}", partial(_without, count, part))
    for count in ROW_SHARDS[1:]
    for part in range(count)
]
