"""Experts on a GPU: the bits of one expert after the other, among any rows and from a graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear_fp32, silu_mul
from spmd_rl.kernels.moe.route_hash import RouteHash, hashed_routes
from spmd_rl.kernels.moe.rows_in_use import using_rows
from spmd_rl.kernels.runtime.cuda_graph import capture
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from tests.gpu.kernels.mixtures import SIZES, mixture, one_by_one, routes_of

pytest.importorskip("triton")

from spmd_rl.kernels.moe import grouped_triton
from spmd_rl.kernels.moe.combine_triton import sum_slots
from spmd_rl.kernels.moe.expert_addresses import KeptAddresses, addresses
from spmd_rl.kernels.moe.experts import grouped_linear, order_slots, scaled_sum
from spmd_rl.kernels.moe.grouped_tiles import REFERENCE, TILES, GroupedTile
from spmd_rl.kernels.moe.order_triton import order_on_device
from spmd_rl.kernels.moe.route_triton import route_on_gpu, weights_on_gpu

ROWS = (1, 8, 33, 64, 256, 512, 3000)
GATED = sorted({tiles.gated for tiles in TILES.values()})
PLAIN = sorted({one for tiles in TILES.values() for one in (tiles.up, tiles.down)})


@pytest.fixture(autouse=True)
def _frees_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", SIZES)
def test_all_experts_at_once_have_the_bits_of_one_by_one(name: str, rows, unequal) -> None:
    """A decoding step, a prompt and a trainer's pass alike, for each number of rows."""
    module = mixture(name)
    for count in ROWS:
        x = rows("normal", count, SIZES[name].hidden)
        with torch.no_grad():
            wanted, found = one_by_one(module, x), module(x)
        assert found.isfinite().all()
        assert unequal(found, wanted) == 0, count
        assert unequal(module(x).detach(), wanted) == 0, f"{count} rows with gradients"


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_a_rows_bits_depend_on_no_other_row(name: str, rows, unequal_rows) -> None:
    module = mixture(name)
    assert unequal_rows(module, rows("normal", 8192, SIZES[name].hidden)) == 0


@pytest.mark.parametrize("name", ["tiny", "30B-A3B"])
def test_rows_in_a_decoding_step_have_the_bits_of_a_trainers_pass(name: str, rows, unequal) -> None:
    module, x = mixture(name), rows("normal", 4096, SIZES[name].hidden)
    trained = module(x).detach()
    with torch.no_grad():
        for size in (1, 8, 64, 256):
            parts = [module(part) for part in x[: 4 * size].split(size)]
            assert unequal(torch.cat(parts), trained[: 4 * size]) == 0, size


def accumulators(module: MoeMlp, x: Tensor, tile: GroupedTile) -> tuple[Tensor, Tensor]:
    """Return fp32 sums of gate and up by row, and of the oracle in the same order."""
    routes = routes_of(module, x)
    order = order_on_device(routes.ids, len(module.experts), tile.m)
    parts = [module.weights(name) for name in ("gate_proj", "up_proj")]
    table = addresses(parts)
    found = grouped_triton.grouped_matmul(x, table, order, tile, gathers=True, dtype=torch.float32)
    tokens, wanted = order.slots // routes.ids.shape[1], []
    starts = order.starts.tolist()
    for expert, (first, end) in enumerate(pairwise(starts)):
        own = x[tokens[first:end].long()]
        wanted.append(torch.cat([linear_fp32(own, part[expert]) for part in parts], 1))
    return found, torch.cat(wanted)


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
@pytest.mark.parametrize("tile", sorted({*PLAIN, REFERENCE}), ids=str)
@torch.no_grad()
def test_accumulators_are_those_of_the_dense_product(
    tile: GroupedTile, kind: str, rows, unequal
) -> None:
    for name in ("uneven", "30B-A3B"):
        module, x = mixture(name), rows(kind, 700, SIZES[name].hidden)
        for weight in module.weights("gate_proj") if kind == "cancelling" else ():
            weight.copy_(rows("normal", *weight.shape).abs())
        assert unequal(*accumulators(module, x, tile)) == 0


@pytest.mark.parametrize("tile", GATED, ids=str)
@torch.no_grad()
def test_the_activation_in_the_kernel_is_that_of_the_dense_layer(
    tile: GroupedTile, rows, unequal
) -> None:
    for name in ("uneven", "30B-A3B"):
        module, x = mixture(name), rows("normal", 300, SIZES[name].hidden)
        order = order_on_device(routes_of(module, x).ids, len(module.experts), tile.m)
        table = addresses([module.weights("gate_proj"), module.weights("up_proj")])
        found, both = (
            grouped_triton.grouped_matmul(x, table, order, tile, gathers=True, gated=gated)
            for gated in (True, False)
        )
        assert unequal(found, silu_mul(*both.chunk(2, 1))) == 0


@pytest.mark.parametrize("normalizes", [True, False])
def test_given_experts_have_the_weights_and_gradients_of_the_router(normalizes: bool) -> None:
    logits = torch.randn(3000, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    pull = torch.randn(3000, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    own, given = (logits.clone().requires_grad_() for _ in range(2))
    ids, weights = route_on_gpu(own, 8, normalizes=normalizes)
    replayed = weights_on_gpu(given, ids, normalizes=normalizes)
    assert torch.equal(replayed, weights)
    for one in (weights, replayed):
        one.backward(pull)
    assert own.grad is not None and given.grad is not None
    assert torch.equal(own.grad, given.grad)
    others = torch.rand(3000, 128, device="cuda").topk(8).indices.sort().values
    assert not torch.equal(weights_on_gpu(given, others, normalizes=normalizes), weights)


@pytest.mark.parametrize("name", ["tiny", "30B-A3B"])
@torch.no_grad()
def test_ties_go_to_lower_ids_and_other_experts_may_be_empty(name: str, rows, unequal) -> None:
    """A router of zeros: all tokens go to the first experts, and the others have no rows."""
    module, sizes = mixture(name), SIZES[name]
    module.gate.weight.zero_()
    for count in (1, 64, 1000):
        x = rows("normal", count, sizes.hidden)
        routes = routes_of(module, x)
        assert routes.ids.tolist() == [list(range(sizes.chosen))] * count
        assert unequal(module(x), one_by_one(module, x)) == 0


@torch.no_grad()
def test_all_tokens_to_one_expert(rows, unequal) -> None:
    module = Moe(256, 16, 1, 128).module(0).to("cuda", torch.bfloat16)
    assert isinstance(module, MoeMlp)
    module.gate.weight.zero_()
    module.gate.weight[11] = 1.0
    for count in (1, 100, 5000):
        x = rows("normal", count, 256).abs()
        assert (routes_of(module, x).ids == 11).all()
        assert unequal(module(x), one_by_one(module, x)) == 0


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (8, 2), (5, 3), (60, 4), (512, 10)])
def test_planted_ties_against_a_stable_sort(experts: int, chosen: int) -> None:
    """Logits on a coarse grid: equal ones are equal in bits, others far apart."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randint(-8, 8, (999, experts), generator=generator) / 4
    wanted = logits.sort(dim=1, descending=True, stable=True).indices[:, :chosen].sort(1).values
    for normalizes in (True, False):
        ids, weights = route_on_gpu(logits.cuda(), chosen, normalizes=normalizes)
        assert torch.equal(ids.cpu(), wanted)
        expected = logits.double().softmax(1).gather(1, wanted)
        if normalizes:
            expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=5e-6, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 3, 64, 511, 512, 513, 5000, 40000])
def test_slots_are_ordered_by_expert_and_then_by_token(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 128, generator=generator).argsort(1)[:, :8].sort(1).values
    ids[:: max(tokens // 7, 1)] = 128
    for tile_rows in (16, 128):
        order = order_on_device(ids.cuda(), 128, tile_rows)
        wanted = ids.flatten().argsort(stable=True)
        assert torch.equal(order.slots.cpu().long(), wanted)
        row_of_slot = torch.empty_like(wanted)
        row_of_slot[wanted] = torch.arange(len(wanted))
        row_of_slot[ids.flatten() == 128] = -1
        assert torch.equal(order.rows.cpu().flatten().long(), row_of_slot)
        counts = ids.flatten().bincount(minlength=129)
        starts = [0, *counts.cumsum(0).tolist()[:128]]
        assert order.starts.tolist() == starts
        number, most = int(order.tiles[0]), order.max_tiles
        assert number <= most
        tiles = order.tiles[1:].view(2, most)[:, :number].tolist()
        assert list(zip(*tiles, strict=True)) == [
            (expert, starts[expert] + first)
            for expert in range(128)
            for first in range(0, int(counts[expert]), tile_rows)
        ]


@pytest.mark.parametrize("name", ["tiny", "30B-A3B", "groups"])
@torch.no_grad()
def test_a_graph_has_the_bits_of_its_used_rows_alone(name: str, rows, unequal) -> None:
    """Rows, the router and the padding change between replays. Padding gives zeros."""
    module, hidden = mixture(name), SIZES[name].hidden
    for size in (1, 8, 64, 256):
        x, used = rows("normal", size, hidden), torch.arange(size, device="cuda")

        def step(x: Tensor = x, used: Tensor = used) -> Tensor:
            with using_rows(used):
                return module(x)

        step()
        graph, out = capture(step, torch.cuda.graph_pool_handle())
        for replay in range(3):
            x.copy_(rows("normal", size, hidden).roll(replay, 0))
            used.copy_(torch.arange(size, device="cuda") - replay * size // 3)
            module.gate.weight.mul_(-1.0)
            x[used < 0] = 7.0 if module.sigmoid else float("nan")
            graph.replay()
            assert unequal(out[used >= 0], module(x[used >= 0])) == 0
            assert module.shared_experts is not None or not out[used < 0].any()


@pytest.mark.parametrize("name", ["tiny", "groups"])
@torch.no_grad()
def test_the_hash_of_routes_is_the_one_of_the_cpu(name: str, rows) -> None:
    module, found = mixture(name), RouteHash()
    batches = [rows("normal", 40, SIZES[name].hidden) * scale for scale in (1.0, -2.0)]
    with hashed_routes() as hashed:
        for x in batches:
            module(x)
    for x in batches:
        found.add(routes_of(module, x).ids.cpu())
    every = torch.arange(40)
    on_gpu, on_cpu = hashed.of_rows(every.cuda()), found.of_rows(every)
    assert on_gpu is not None
    assert on_cpu is not None
    assert torch.equal(on_gpu.cpu(), on_cpu)


@torch.no_grad()
def test_the_host_does_not_wait(rows) -> None:
    module = mixture("30B-A3B")
    given = [rows("normal", count, 2048) for count in (8, 4096)]
    for x in given:
        module(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in given:
            module(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("name", ["uneven", "30B-A3B"])
def test_adapted_experts_have_the_bits_of_one_by_one(name: str, rank: int, rows, unequal) -> None:
    module = mixture(name, rank=rank)
    for count in (1, 33, 600):
        x = rows("normal", count, SIZES[name].hidden)
        with torch.no_grad():
            wanted = one_by_one(module, x)
            assert unequal(module(x), wanted) == 0
        assert unequal(module(x).detach(), wanted) == 0


@torch.no_grad()
def test_controls_another_order_of_sums_or_a_rounding_more_is_seen(rows, unequal) -> None:
    """K in two halves, slots in another order, and a weight outside of the accumulator."""
    module, x = mixture("30B-A3B"), rows("normal", 512, 2048)
    wanted, routes = module(x), routes_of(module, x)
    order, kept = order_slots(routes, 128), KeptAddresses()
    gate = module.weights("gate_proj")
    halves = [
        [one[:, part].contiguous() for one in gate] for part in (slice(1024), slice(1024, 2048))
    ]
    whole = grouped_triton.grouped_matmul(
        x, addresses([gate]), order, REFERENCE._replace(m=order.tile_rows), gathers=True,
        dtype=torch.float32,
    )  # fmt: skip
    parts = [
        grouped_triton.grouped_matmul(
            x[:, first : first + 1024].contiguous(), addresses([half]), order,
            REFERENCE._replace(m=order.tile_rows), gathers=True, dtype=torch.float32,
        )
        for half, first in zip(halves, (0, 1024), strict=True)
    ]  # fmt: skip
    assert unequal(parts[0] + parts[1], whole) > 0.1 * whole.numel()
    up = grouped_linear(x, module.weights("up_proj"), order, kept, "up", gathers=True)
    hidden = silu_mul(whole.bfloat16(), up)
    down = module.weights("down_proj")
    rounded = grouped_linear(hidden, down, order, kept, "down", gathers=False)
    assert unequal(scaled_sum(rounded, routes.weights, order), wanted) > 1000
    y = rows("wide", order.num_slots, 2048)
    turned = order_slots(routes._replace(ids=routes.ids.flip(1)), 128)
    assert torch.equal(turned.slots // 8, order.slots // 8), "an expert's rows are by token"
    assert unequal(sum_slots(y, turned), sum_slots(y, order)) > 100
