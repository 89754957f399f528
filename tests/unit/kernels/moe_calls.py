"""A mixture as it is computed on a GPU, with plain tensors, for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision import block_codes, unpack_triton
from spmd_rl.kernels.moe import (
    adapted_experts,
    coded_grouped_triton,
    combine_triton,
    experts,
    grouped_tiles,
    order_triton,
)
from spmd_rl.kernels.moe.dispatcher import Dispatched
from spmd_rl.kernels.moe.expert_addresses import KeptAddresses
from spmd_rl.kernels.moe.grouped_tiles import GradTile, GroupedTile, Tiles
from spmd_rl.kernels.moe.route_hash import RouteHash, hashed_routes
from spmd_rl.kernels.moe.route_triton import route_on_gpu, weights_on_gpu
from spmd_rl.kernels.moe.rows_in_use import using_rows
from spmd_rl.kernels.moe.slots import by_expert
from spmd_rl.model.formats import FORMATS
from spmd_rl.model.layers import split_experts
from spmd_rl.model.layers.mlp import PROJECTIONS
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.linear import Factors, Linear
from spmd_rl.model.lora import LoraConfig

assert adapted_experts is not None
NO_IDS = torch.empty(0, 1, dtype=torch.int64)
TILE = GroupedTile(16, 16, 16, 4, 2)


def use_small_tiles() -> None:
    """Have products of a few rows and columns take several tiles each way."""
    swapped = TILE._replace(swap=True)
    grouped_tiles.TILES.clear()
    grouped_tiles.TILES[4] = Tiles(swapped, swapped._replace(n=32), swapped, TILE)
    tall = TILE._replace(m=32)
    grouped_tiles.TILES[1 << 31] = Tiles(
        tall, tall._replace(n=32, k=32), tall._replace(group=2), tall._replace(n=32)
    )
    experts.OUTER = GradTile(16, 32, 16, 4, 2, 2)  # type: ignore[attr-defined]
    order_triton.CHUNK = 64
    order_triton.CHUNKS_AT_ONCE = 2
    combine_triton.BLOCK = combine_triton.ROW_BLOCK = 32


def mixture(
    sizes: tuple[int, ...],
    normalizes: bool,
    state: dict[str, Tensor],
    rank: int = 0,
    shared: int = 0,
    limit: float = 0.0,
) -> MoeMlp:
    """Return a mixture with the weights in `state`, and adapters of a rank if there is one.

    With a limit, it has biases.

    With a shared expert, its router is one of sigmoids, which chooses one of two groups.
    """
    sigmoid = SigmoidRouter(2, 1, 2.5) if shared else None
    layer = Moe(*sizes, normalizes, shared, sigmoid, biases=limit > 0, limit=limit)
    module = layer.module(0)
    assert isinstance(module, MoeMlp)
    for expert in module.experts if rank else ():
        for layer in expert.children():
            layer.adapt(rank, LoraConfig(rank=rank).scale)
    module.load_state_dict(state)
    return module


def forward_and_gradients(
    sizes: tuple[int, ...], normalizes: bool, state: dict[str, Tensor], rank: int, shared: int,
    x: Tensor, pull: Tensor, limit: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the output with and without gradients, and the gradients of x and all weights."""
    use_small_tiles()
    module = mixture(sizes, normalizes, state, rank, shared, limit)
    x = x.requires_grad_()
    out = module.all_at_once(x, module.gate(x))
    out.backward(pull)
    with torch.no_grad(), hashed_routes() as hashed:
        alone = module.all_at_once(x, module.gate(x))
    found = {name: one.grad for name, one in module.named_parameters() if one.requires_grad}
    return {"x": x.grad, "out": out.detach(), "alone": alone, "hash": hashed.state, **found}


def adapt(module: MoeMlp) -> None:
    """Give each projection of each expert an adapter."""
    generator = torch.Generator().manual_seed(7)
    for expert in module.experts:
        for name in PROJECTIONS:
            layer = getattr(expert, name)
            layer.adapt(4, 0.5)
            for factor in layer.adapter:
                values = torch.randn(factor.shape, generator=generator).to(layer.weight.dtype)
                factor.data = values / 4


def shared_experts(
    sizes: tuple[int, ...], state: dict[str, Tensor], x: Tensor, pull: Tensor, adapted: bool
) -> tuple[dict[str, Any], ...]:
    """Return outputs and gradients of a mixture, and of one whose ranks share its experts: one
    rank, of which no row comes in the last output. With `adapted`, the experts have adapters.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    split_experts.is_exact = torch.is_tensor  # type: ignore[attr-defined]
    found = []
    for is_split in (False, True):
        module, given = mixture(sizes, True, state), x.clone().requires_grad_()
        if adapted:
            adapt(module)
        if is_split:
            module.split(dist.group.WORLD)
        out = module.all_at_once(given, given @ module.gate.weight.t())
        out.backward(pull)
        with torch.no_grad():
            alone = module.all_at_once(given, given @ module.gate.weight.t())
        named = module.named_parameters()
        gradients = {name: one.grad for name, one in named if one.requires_grad}
        found.append({"out": out.detach(), "alone": alone, "x": given.grad, **gradients})
    rows = x.new_empty(0, x.shape[1]).requires_grad_()
    sent = Dispatched(rows, x.new_empty(0), [[0] * sizes[1]], by_expert(NO_IDS, sizes[1]), [0])
    weights = [
        [[Factors((one.detach(),), 1.0) for one in module.weights(name)]] for name in PROJECTIONS
    ]
    none = split_experts._at_once(sent, weights, KeptAddresses())
    none.sum().backward()
    found[0]["none"], found[1]["none"] = rows.detach(), none.detach()
    return tuple(found)


def routes(
    logits: Tensor, num_chosen: int, normalizes: bool, used: Tensor | None
) -> tuple[Tensor, ...]:
    """Return ids, weights, the hash of two layers, and the gradient of the logits."""
    logits = logits.requires_grad_()
    with hashed_routes() as hashed:
        if used is None:
            ids, weights = route_on_gpu(logits, num_chosen, normalizes=normalizes)
            route_on_gpu(logits.flip(0), num_chosen, normalizes=normalizes)
        else:
            with using_rows(used):
                ids, weights = route_on_gpu(logits.detach(), num_chosen, normalizes=normalizes)
    if used is not None:
        return ids, weights
    (weights * torch.arange(1.0, num_chosen + 1)).sum().backward()
    assert isinstance(hashed, RouteHash)
    assert hashed.state is not None
    assert logits.grad is not None
    return ids, weights.detach(), hashed.state, logits.grad


def replayed(
    logits: Tensor, ids: Tensor, normalizes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights of these experts and of those that are chosen, each with the gradient of
    the logits.
    """
    given, chosen = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = weights_on_gpu(given, ids, normalizes=normalizes)
    own = route_on_gpu(chosen, ids.shape[1], normalizes=normalizes).weights
    for one in (weights, own):
        (one * torch.arange(1.0, ids.shape[1] + 1)).sum().backward()
    assert given.grad is not None and chosen.grad is not None
    return weights.detach(), given.grad, own.detach(), chosen.grad


def ordered(ids: Tensor, num_experts: int, tile_rows: int, chunk: int) -> tuple[Tensor, ...]:
    """Return the lists of an order of slots."""
    order_triton.CHUNK, order_triton.CHUNKS_AT_ONCE = chunk, 2
    found = order_triton.order_on_device(ids, num_experts, tile_rows)
    return found.slots, found.rows, found.starts, found.tiles


def padded(
    sizes: tuple[int, ...], state: dict[str, Tensor], x: Tensor, used: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of x with some rows unused, and that of the used rows alone."""
    use_small_tiles()
    module = mixture(sizes, True, state)
    with torch.no_grad():
        with using_rows(used):
            whole = module.all_at_once(x, x @ module.gate.weight.t())
        some = x[used >= 0]
        return whole, module.all_at_once(some, some @ module.gate.weight.t())


def coded_output(
    name: str, sizes: tuple[int, ...], state: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of a mixture whose experts are codes, and of one with what these stand for.

    Both have the same tiles.
    """
    use_small_tiles()
    own = FORMATS[name]
    swapped = TILE._replace(n=64, k=64, swap=True)
    for rows in (16, 32):  # with several codes in a byte, several products of 64 columns are a step
        one = swapped._replace(m=rows, k=64 * own.per_byte)
        tiles = coded_grouped_triton.CodedTiles(one, one)
        coded_grouped_triton.TILES[own.bits][rows] = tiles
    grouped_tiles.TILES[1 << 31] = Tiles(*[swapped._replace(m=32)] * 3, TILE)
    grouped_tiles.TILES[4] = Tiles(swapped, swapped, swapped, TILE)
    unpack_triton.e4m3_products = _e4m3_products  # type: ignore[attr-defined]
    unpack_triton.int4_products = _int4_products  # type: ignore[attr-defined]
    coded, plain = mixture(sizes, True, state), mixture(sizes, True, state)
    for expert, other in zip(coded.experts, plain.experts, strict=True):
        for layer, twin in zip(expert.children(), other.children(), strict=True):
            assert isinstance(layer, Linear) and isinstance(twin, Linear)
            coded_weight = block_codes.quantised(own, layer.weight)
            layer.hold_codes(own)
            layer.codes.codes.copy_(coded_weight.codes)
            layer.codes.scales.copy_(coded_weight.scales)
            twin.weight.data = coded_weight.decoded(torch.float32)
    with torch.no_grad():
        logits = x @ coded.gate.weight.t()
        return coded.all_at_once(x, logits), plain.all_at_once(x, logits)


def _e4m3_products(codes: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the numbers that codes stand for: the interpreter knows no assembly."""
    bits = codes.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
    normal = (1 + mantissa / 8) * tl.exp2(exponent.to(tl.float32) - 7)
    size = tl.where(exponent == 0, mantissa / 512, normal)
    return tl.where(bits >> 7 == 1, -size, size) * scale


def _int4_products(packed: tl.tensor, scale: tl.tensor, part: Any) -> tl.tensor:
    nibbles = (packed.to(tl.int32) >> (4 * int(part))) & 15
    return ((nibbles ^ 8) - 8).to(tl.float32) * scale.to(tl.float32)[:, None]
