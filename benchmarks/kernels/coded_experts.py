"""Experts of Qwen3-30B-A3B in few bits on one GPU, beside our own in bfloat16.

A step is several layers one after the other, in one graph, so that weights are cold in L2. The two
take turns, with the same routes. The bits of both are compared first, with the decoded weights.

    python -m benchmarks.kernels.coded_experts [--weights e4m3] [--tiles] [--save]

With --tiles, all tiles that could serve are timed instead, and the fastest are printed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.coded_gemm import options_of
from benchmarks.kernels.timing import in_turns
from benchmarks.moe_kernels import CHOSEN, EXPERTS, HIDDEN, INNER, new_layer, routes_of, weights_of
from benchmarks.record import compared, counted, finish, gpu, gpu_machine
from benchmarks.table import Row
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.kernels.low_precision.products import whole
from spmd_rl.kernels.moe.coded_grouped_triton import coded_grouped_matmul
from spmd_rl.kernels.moe.expert_addresses import KeptAddresses, addresses
from spmd_rl.kernels.moe.experts import ExpertWeights, experts_output
from spmd_rl.kernels.moe.grouped_tiles import GroupedTile, choose_tiles
from spmd_rl.kernels.moe.order_triton import order_on_device
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.model.formats import FORMATS
from spmd_rl.types.code_format import CodeFormat

BATCHES = (1, 8, 64, 256, 2048, 8192)
LAYERS = 12
SHARED_BYTES = 220 << 10


class Experts(NamedTuple):
    """The experts of a layer, and the addresses of their weights."""

    weights: ExpertWeights
    kept: KeptAddresses

    def output(self, x: Tensor, routes: ExpertRoutes) -> Tensor:
        return experts_output(x, routes, self.weights, self.kept)


class Pair(NamedTuple):
    """The experts of a layer in few bits, in bf16 with what their codes stand for, and routes."""

    coded: Experts
    plain: Experts
    routes: ExpertRoutes


def pairs(x: Tensor, num_layers: int, own: CodeFormat) -> list[Pair]:
    found = []
    for seed in range(num_layers):
        module = new_layer(seed).module
        parts = weights_of(module)
        coded = ExpertWeights(
            *([block_codes.quantised(own, one) for one in part] for part in parts)
        )
        plain = ExpertWeights(*([whole(one, x.dtype) for one in part] for part in coded))
        routes = routes_of(module, x)
        found.append(Pair(Experts(coded, KeptAddresses()), Experts(plain, KeptAddresses()), routes))
    return found


@torch.no_grad()
def measure(batch: int, own: CodeFormat) -> Iterator[Row]:
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    given = pairs(x, LAYERS, own)
    same = [torch.equal(c.output(x, r), p.output(x, r)) for c, p, r in given]
    ways = [
        lambda one: one.coded.output(x, one.routes),
        lambda one: one.plain.output(x, one.routes),
    ]
    coded, plain = in_turns(ways, given, rounds=1)
    what = f"{own.name}: experts, {batch} tokens"
    print(f"{what}: {coded:.2f} us, bf16 {plain:.2f} us, {plain / coded:.2f}x", flush=True)
    yield compared(what, coded, "us", peer="bf16", peer_value=plain)
    yield counted(f"{what}, equal bits", same)


def possible_tiles(m: int, own: CodeFormat) -> list[GroupedTile]:
    """Return tiles of m rows that fit into shared memory."""
    found = []
    for width, step, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4, 6)):
        if own.per_byte > 1 and step < own.block_columns:
            continue
        bytes_of_stage = 2 * width * step // own.per_byte + 2 * m * step
        if stages * bytes_of_stage + 2 * width * step <= SHARED_BYTES:
            found.append(GroupedTile(m, width, step, warps, stages, swap=True))
    return found


@torch.no_grad()
def tune(batch: int, own: CodeFormat) -> None:
    """Print the fastest tiles of gate and up, and of down."""
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    tile_rows = choose_tiles(batch * CHOSEN, EXPERTS).m
    given = pairs(x, LAYERS // 3, own)
    for is_gated in (True, False):
        calls = [_call_of(x, one, is_gated, tile_rows) for one in given]
        tiles = possible_tiles(tile_rows, own)
        ways = [lambda call, tile=tile: call(tile) for tile in tiles]
        times = in_turns(ways, calls, rounds=1, turns=5)
        best = sorted(zip(times, tiles, strict=True))[:4]
        listed = "; ".join(f"{us:.2f} {tuple(tile)}" for us, tile in best)
        print(f"{'gated' if is_gated else 'down'}, {batch} tokens: {listed}", flush=True)


def _call_of(
    x: Tensor, one: Pair, is_gated: bool, tile_rows: int
) -> Callable[[GroupedTile], Tensor]:
    """Return a call of the kernel with a tile."""
    order = order_on_device(one.routes.ids, EXPERTS, tile_rows)
    weights, scales = one.coded.weights, one.routes.weights
    if is_gated:
        both = addresses([weights.gate, weights.up])
        return lambda tile: coded_grouped_matmul(x, both, order, tile, gathers=True, gated=True)
    down = addresses([weights.down])
    hidden = torch.randn(order.num_slots, INNER, device="cuda").bfloat16()
    return lambda tile: coded_grouped_matmul(hidden, down, order, tile, scales=scales)


def main() -> int:
    options = options_of(__doc__)
    own = FORMATS[options.weights]
    if options.tiles:
        for batch in BATCHES:
            tune(batch, own)
        return 0
    rows = [row for batch in BATCHES for row in measure(batch, own)]
    packages = ("torch", "triton")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
