"""Adapters on a GPU: one kernel has the bits of separate products, for any rows and parts."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels import linear, silu_mul
from spmd_rl.kernels.linear.adapters import add_adapters
from spmd_rl.kernels.runtime.cuda_graph import capture

pytest.importorskip("triton")

from spmd_rl.kernels.linear import adapters_triton

ROWS = (1, 7, 16, 17, 33, 64, 65, 256, 1000, 1024, 4097)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("rank", [3, 8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("widths", [(4096, 1024, 1024), (3072, 3072), (72, 40, 8), (1024,)])
def test_bits_are_those_of_separate_products(rank: int, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, product = drawn(max(ROWS), 1024), drawn(max(ROWS), sum(widths))
    down, up = drawn(rank * len(widths), 1024) / 32, drawn(sum(widths), rank)
    parts = zip(product.split(widths, 1), down.split(rank), up.split(list(widths)), strict=True)
    wanted = torch.cat([own + linear(linear(x, one) * 1.7, other) for own, one, other in parts], 1)
    with torch.no_grad():
        for rows in ROWS:
            found, _ = add_adapters(product[:rows].clone(), x[:rows], down, up, 1.7, widths)
            assert torch.equal(found.view(torch.int16), wanted[:rows].view(torch.int16)), rows


def test_rounding_once_less_is_seen() -> None:
    """The negative control: without the rounding of B's product, bits differ."""
    torch.manual_seed(0)
    low, up, product = drawn(256, 16), drawn(512, 16), drawn(256, 512)
    found = product.clone()
    adapters_triton.add_low_rank(found, low, up, 1.7, (512,))
    scaled = (low * 1.7).float()
    assert not torch.equal(found, (product.float() + scaled @ up.float().T).bfloat16())


@pytest.mark.parametrize("rows", [1, 16, 64, 200])
def test_a_graph_has_the_same_bits_when_adapters_change(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, out = drawn(rows, 1024), drawn(2048, 1024), drawn(rows, 1024)
    down, up = drawn(32, 1024) / 32, drawn(2048, 16)

    @torch.no_grad()
    def layer() -> None:
        product = linear(x, weight)
        total, _ = add_adapters(product, x, down, up, 2.0, (1024, 1024))
        out.copy_(silu_mul(*total.chunk(2, 1)))

    layer()
    graph, _ = capture(layer, torch.cuda.graph_pool_handle())
    for seed in range(3):
        torch.manual_seed(seed)
        up.copy_(drawn(2048, 16))
        x.copy_(drawn(rows, 1024))
        layer()
        wanted = out.clone()
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
