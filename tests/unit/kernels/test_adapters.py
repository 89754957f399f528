"""What adapters add: the op against float64, and its GPU kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.kernels.linear.adapters import add_adapters

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results

# rows, rank and the parts' widths: tiles that end inside a matrix, and at the end of a part
CASES = [
    (5, 16, (64, 128, 64)),
    (17, 8, (128, 64)),
    (40, 3, (24, 8, 40)),
    (70, 64, (100,)),
    (33, 100, (64, 64)),
    (2, 24, (8, 8, 8, 8)),
]


def drawn(rows: int, rank: int, widths: Sequence[int], seed: int = 0) -> tuple[Tensor, ...]:
    """Return a product, what A made, and B: small whole numbers, whose sums are all exact."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, sum(widths)), (rows, rank * len(widths)), (sum(widths), rank)
    return tuple(torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes)


def expected(
    product: Tensor, low: Tensor, up: Tensor, scale: float, widths: Sequence[int]
) -> Tensor:
    parts = zip(low.split(up.shape[1], 1), up.split(list(widths)), strict=True)
    added = [((one * scale).to(low.dtype).double() @ other.double().T) for one, other in parts]
    return (product.double() + torch.cat(added, 1).to(low.dtype)).to(low.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_adds_to_each_part_and_to_nothing_else(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    calls, wanted = [], []
    for (rows, rank, widths), scale in zip(CASES, (0.5, 2.0, 1.0, 0.25, 0.5, 4.0), strict=True):
        product, low, up = (one.to(dtype) for one in drawn(rows, rank, widths))
        wide = torch.cat([torch.full((rows, 3), 7.0, dtype=dtype), product], 1)
        calls.append((wide, low, up, scale, widths, 3))
        wanted.append(torch.cat([wide[:, :3], expected(product, low, up, scale, widths)], 1))
    found = results(Calls("tests.unit.kernels.adapters_calls", "added", {}, calls), tmp_path)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_the_op_adds_what_float64_adds() -> None:
    generator = torch.Generator().manual_seed(0)
    widths, rank = (24, 8, 40), 5
    shapes = (50, 72), (50, 32), (15, 32), (72, 5)
    product, x, down, up = (torch.randn(shape, generator=generator) for shape in shapes)
    total, low = add_adapters(product.clone(), x, down, up, 0.7, widths)
    wide = x.double() @ down.double().T
    torch.testing.assert_close(low, wide.float(), rtol=1e-5, atol=1e-5)
    parts = zip(wide.split(rank, 1), up.double().split(list(widths)), strict=True)
    added = torch.cat([0.7 * one @ other.T for one, other in parts], 1)
    torch.testing.assert_close(total, (product.double() + added).float(), rtol=1e-5, atol=1e-5)


def test_parts_have_the_bits_that_they_have_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = (64, 16, 16)
    x, down = (torch.randn(shape, generator=generator) for shape in ((21, 32), (12, 32)))
    product, up = torch.randn(21, 96, generator=generator), torch.randn(96, 4, generator=generator)
    together = add_adapters(product.clone(), x, down, up, 1.5, widths)[0].split(widths, 1)
    parts = zip(
        together, product.split(widths, 1), down.split(4), up.split(list(widths)), strict=True
    )
    for found, own, one, other in parts:
        alone, low = add_adapters(own.clone(), x, one, other, 1.5, (len(other),))
        assert torch.equal(found, alone)
        assert torch.equal(alone, own + linear(low * 1.5, other))
        assert torch.equal(
            add_adapters(own[:1], x[:1], one, other, 1.5, (len(other),))[0], alone[:1]
        )
