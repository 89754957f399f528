"""Hopper code of a mixture's kernels: one chain for each sum, and no rounding left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.kernels.moe import (
    coded_grouped_triton,
    combine_triton,
    grouped_triton,
    order_triton,
    route_triton,
)
from spmd_rl.kernels.moe.coded_grouped_triton import TILES as CODED
from spmd_rl.kernels.moe.expert_addresses import Addresses, addresses
from spmd_rl.kernels.moe.grouped_tiles import OUTER, REFERENCE, TILES, GroupedTile
from spmd_rl.kernels.moe.order_triton import DeviceOrder, most_tiles
from spmd_rl.model.formats import FORMATS
from tests.unit.kernels.compiled import SHARED_BYTES, compiled_of, instructions, spilled_bytes

BF16 = torch.bfloat16
TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 64, 2048, 768, 128, 8
GATED = sorted({tiles.gated for tiles in TILES.values()})
PLAIN = sorted({one for tiles in TILES.values() for one in (tiles.up, tiles.down)} | {REFERENCE})
TURNED = sorted({tiles.turned for tiles in TILES.values()})
WGMMA_ROWS, K_OF_ONE = 64, 16


@pytest.fixture(autouse=True, scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither use nor leave behind compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def rows(count: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(count, columns, dtype=dtype)


def order(tile_rows: int) -> DeviceOrder:
    slots = TOKENS * CHOSEN
    sizes = slots, slots, EXPERTS + 1, 1 + 2 * most_tiles(slots, EXPERTS, tile_rows)
    found = [torch.zeros(size, dtype=torch.int32) for size in sizes]
    found[1] = found[1].view(TOKENS, CHOSEN)
    return DeviceOrder(*found, tile_rows, EXPERTS)


def table(parts: int, n: int, k: int) -> Addresses:
    weight = rows(n, k)
    return addresses([[weight] * EXPERTS] * parts)


def gate_up(tile: GroupedTile, gated: bool) -> object:
    x, weights = rows(TOKENS, HIDDEN), table(2, INNER, HIDDEN)
    return compiled_of(
        grouped_triton._grouped,
        lambda: grouped_triton.grouped_matmul(
            x, weights, order(tile.m), tile, gathers=True, gated=gated
        ),
    )


def down(tile: GroupedTile) -> object:
    x, weights = rows(TOKENS * CHOSEN, INNER), table(1, HIDDEN, INNER)
    scales = rows(TOKENS, CHOSEN, torch.float32)
    return compiled_of(
        grouped_triton._grouped,
        lambda: grouped_triton.grouped_matmul(x, weights, order(tile.m), tile, scales=scales),
    )


def check_chain(
    compiled: object, tile: GroupedTile, chains: int, added: set[str], small: str = "b16"
) -> None:
    """One instruction for each 16 of K adds to a chain, and copies are of 16 bytes.

    No element of the type `small` is loaded alone.
    """
    assert compiled.metadata.shared <= SHARED_BYTES
    found = instructions(compiled.asm["ptx"])
    (name,) = [one for one in found if one.startswith(("mma", "wgmma.mma"))]
    tall, wide = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    if name.startswith("wgmma"):
        columns = int(name.partition("m64n")[2].partition("k")[0])
        of_step = tall // (tile.warps // 4) * wide // (WGMMA_ROWS * columns)
        assert found[name] == chains * of_step * tile.k // K_OF_ONE
    sums = ("add.f32", "add.rn.f32", "fma.rn.f32", "red.", "atom.")
    assert {one for one in found if one.startswith(sums)} <= added
    assert found["cp.async.cg.shared.global"]
    assert not found[f"ld.global.{small}"], "a weight's alignment is not known"


@pytest.mark.parametrize("tile", GATED, ids=str)
def test_gate_and_up_are_a_chain_each(tile: GroupedTile) -> None:
    check_chain(gate_up(tile, gated=True), tile, 2, {"add.rn.f32"})  # SiLU's


@pytest.mark.parametrize("tile", PLAIN, ids=str)
def test_products_are_one_chain(tile: GroupedTile) -> None:
    check_chain(gate_up(tile, gated=False), tile, 1, set())
    check_chain(down(tile), tile, 1, set())


@pytest.mark.parametrize("tile", TURNED, ids=str)
def test_gradients_of_rows_are_one_chain(tile: GroupedTile) -> None:
    x, both, one = rows(TOKENS, HIDDEN), table(2, INNER, HIDDEN), table(1, HIDDEN, INNER)
    kernel, turned = grouped_triton._grouped, grouped_triton.grouped_matmul_turned
    of_rows, given = rows(TOKENS * CHOSEN, 2 * INNER), order(tile.m)
    down = compiled_of(kernel, lambda: turned(x, one, given, tile, gathers=True))
    check_chain(down, tile, 1, set())
    check_chain(compiled_of(kernel, lambda: turned(of_rows, both, given, tile)), tile, 2, set())


@pytest.mark.parametrize("of_down", [False, True])
def test_gradients_of_weights_are_one_chain(of_down: bool) -> None:
    x, of_rows = rows(TOKENS, HIDDEN), rows(TOKENS * CHOSEN, INNER)
    grad, other = (x, of_rows) if of_down else (of_rows, x)
    compiled = compiled_of(
        grouped_triton._outer,
        lambda: grouped_triton.grouped_outer(
            grad, other, order(16), OUTER, gathers_grad=of_down, gathers_x=not of_down
        ),
    )
    tile = GroupedTile(OUTER.m, OUTER.n, OUTER.k, OUTER.warps, OUTER.stages)
    check_chain(compiled, tile, 1, set())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tile_rows", CODED[8])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_codes_are_the_same_chain(name: str, tile_rows: int, gated: bool) -> None:
    """Codes alone are copied, two are multiplied at once, and no register is spilled."""
    own = FORMATS[name]
    tiles = CODED[own.bits][tile_rows]
    tile = tiles.gated if gated else tiles.plain
    assert tile.m == tile_rows and own.block_columns % tile.n == own.block_columns % tile.k == 0
    x, weight = rows(TOKENS, HIDDEN), block_codes.quantised(own, torch.zeros(INNER, HIDDEN))
    weights = addresses([[weight] * EXPERTS] * 2)
    compiled = compiled_of(
        coded_grouped_triton._coded_grouped,
        lambda: coded_grouped_triton.coded_grouped_matmul(
            x, weights, order(tile.m), gathers=True, gated=gated
        ),
    )
    chains = 1 + gated
    # scales of rows are loaded one by one
    small = "b8" if own.block_rows == 1 else "b16"
    check_chain(compiled, tile, chains, {"add.rn.f32"} if gated else set(), small)
    found = instructions(compiled.asm["ptx"])
    assert not any(name.startswith("mma") for name in found)
    decoded = tile.n * tile.k // (32 * tile.warps)
    assert found["mul.rn.bf16x2"] == chains * decoded // 2
    assert spilled_bytes(compiled.asm["ptx"]) == 0


def test_a_tile_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="a tile of 128 rows, where the order has tiles of 16"):
        grouped_triton.grouped_matmul(
            rows(TOKENS, HIDDEN), table(1, INNER, HIDDEN), order(16), REFERENCE, gathers=True
        )


@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_other_kernels_compile_without_atomic_sums(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are of whole numbers, in shared memory. The combine adds slots and fuses nothing."""
    ids, logits = torch.zeros(tokens, CHOSEN, dtype=torch.int64), rows(tokens, EXPERTS, torch.float)
    kernels = [order_triton._place]
    if tokens * CHOSEN > order_triton.CHUNK:
        kernels += [order_triton._count, order_triton._find_bases]
    for kernel in kernels:
        compiled = compiled_of(kernel, lambda: order_triton.order_on_device(ids, EXPERTS, 16))
        assert compiled.metadata.shared <= SHARED_BYTES
    compiled = compiled_of(
        route_triton._route,
        lambda: route_triton.route_on_gpu(logits, CHOSEN, normalizes=True),
    )
    assert "fma.rn.f32" not in instructions(compiled.asm["ptx"])
    compiled = compiled_of(
        route_triton._route, lambda: route_triton.weights_on_gpu(logits, ids, normalizes=True)
    )
    assert "fma.rn.f32" not in instructions(compiled.asm["ptx"])
    with torch.enable_grad():
        logits.requires_grad_()
        compiled_of(
            route_triton._route_backward,
            lambda: route_triton.route_on_gpu(logits, CHOSEN, normalizes=True)[1].sum().backward(),
        )
    compiled = compiled_of(
        combine_triton._sum_slots,
        lambda: combine_triton.sum_slots(rows(TOKENS * CHOSEN, HIDDEN), order(16)),
    )
    added = [one for one in instructions(compiled.asm["ptx"]) if "f32" in one]
    assert not [one for one in added if one.startswith(("fma", "red", "atom"))]
    compiled_of(
        combine_triton._gated_gradients,
        lambda: combine_triton.gated_gradients(
            rows(TOKENS * CHOSEN, INNER), rows(TOKENS * CHOSEN, 2 * INNER),
            rows(TOKENS, CHOSEN, torch.float32), order(16),
        ),
    )  # fmt: skip
