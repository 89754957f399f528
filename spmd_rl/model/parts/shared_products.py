"""Products of layers that ranks may share: which layers have them, and in how many parts."""

from __future__ import annotations

from torch import nn

from spmd_rl.kernels.linear.row_shards import ColumnParallel, RowParallel, SharedProduct
from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.layers.moe_module import mixtures
from spmd_rl.model.linear import Linear
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import HEAD, ModelSpec


def share_products(model: nn.Module, spec: ModelSpec, part: ModelPart) -> None:
    """Give the layers of a part of the model `spec` the products that its `row_shards` ask for.

    Ranks of an engine share the experts of its mixtures too.
    """
    for mixture in mixtures(model):
        mixture.part = part
        if isinstance(part.exchange, TorchExchange) and not part.trains:
            mixture.split(part.exchange.group)
    if spec.row_shards == 1:
        return
    own = {one.name: one for one in part.spec(spec).parameters()}
    for one in spec.parameters():
        module_name, _, kind = one.name.rpartition(".")
        if one.tp_cut is None or one.name == HEAD or kind != "weight":
            continue
        module = model.get_submodule(module_name)
        if isinstance(module, Linear):
            module.product = _product(spec.row_shards, one, own[one.name], part)


def _product(num_parts: int, whole: TensorSpec, own: TensorSpec, part: ModelPart) -> SharedProduct:
    """Return the product of a layer of which a rank has `own`."""
    assert whole.cut is not None
    dim = whole.cut.dim
    num_own = own.shape[dim] * num_parts // whole.shape[dim]
    return ColumnParallel(num_own) if dim == 0 else RowParallel(num_own, part.exchange, part.rows)
