"""Sums of parts of K on GPUs: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels.linear import part_sums_triton
from spmd_rl.kernels.linear.dispatch import matmul
from tests.unit.kernels.compiled import instructions, ptx_of
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.part_sums_calls"
ROWS, COLUMNS = 5, 40
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def drawn(count: int) -> tuple[Tensor, Tensor]:
    """Return parts of very different sizes, whose sums show their order, and a bias."""
    rng = np.random.default_rng(count)
    shape = count, ROWS, COLUMNS
    parts = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype("f4")
    return torch.from_numpy(parts), torch.from_numpy(rng.standard_normal(COLUMNS)).to(BF16)


def as_a_tree(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Return numpy's sum of neighbours, and of neighbours of these sums, plus the bias."""
    sums = list(parts.numpy())
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return torch.from_numpy(sums[0] if bias is None else sums[0] + bias.float().numpy())


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_are_added_as_a_tree(has_bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    given = [(parts, bias if has_bias else None) for parts, bias in map(drawn, (2, 4, 8))]
    calls = Calls(CALLS, "added", {}, [(*one, dtype) for one in given])
    found = results(calls, tmp_path)
    for one, (parts, bias) in zip(found, given, strict=True):
        assert torch.equal(one, as_a_tree(parts, bias).to(dtype))
        in_order = sum(parts[1:], parts[0])
        if len(parts) > 2 and bias is None and dtype == FP32:
            assert not torch.equal(one, in_order)


@pytest.mark.parametrize("swap", [False, True])
def test_a_product_has_a_chain_for_each_part(swap: bool, tmp_path: Path) -> None:
    """Chains of the interpreter's products add one product after the other, as numpy does."""
    rng, k = np.random.default_rng(1), 256
    shapes = (21, k), (40, k), (40,)
    x, weight, bias = (torch.from_numpy(rng.standard_normal(one).astype("f4")) for one in shapes)
    tile = 16, 32, 16, 4, 2, swap
    given = [(chains, added) for chains in (1, 2, 4, 8) for added in (None, bias)]
    calls = Calls(CALLS, "product", {}, [(x, weight, one, tile, chains) for chains, one in given])
    found = results(calls, tmp_path)
    products = x.numpy()[:, None] * weight.numpy()
    for one, (chains, added) in zip(found, given, strict=True):
        sums = []
        for part in np.split(products, chains, axis=2):
            total = np.zeros(part.shape[:2], "f4")
            for step in np.split(part, part.shape[2] // 16, axis=2):
                total = total + np.cumsum(step, axis=2, dtype="f4")[:, :, -1]
            sums.append(total)
        assert torch.equal(one, as_a_tree(torch.from_numpy(np.stack(sums)), added))
    assert len({one.numpy().tobytes() for one in found}) == len(found)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_parts_are_read_and_stored_in_units_of_16_bytes(count: int) -> None:
    parts, out = torch.zeros(count, 64, 1024), torch.zeros(64, 1024)
    ptx = ptx_of(part_sums_triton._add_parts, lambda: part_sums_triton.add_parts(parts, None, out))
    each = part_sums_triton.BLOCK // 128 // 4
    found = instructions(ptx)
    loads = {name: number for name, number in found.items() if name.startswith("ld.global")}
    assert loads == {"ld.global.v4.b32": count * each}
    assert found["add.rn.f32"] + found["add.f32"] == (count - 1) * 4 * each


@pytest.mark.parametrize(("num_parts", "k"), [(3, 384), (16, 512), (2, 129)])
def test_other_numbers_of_parts_are_refused(num_parts: int, k: int) -> None:
    x, weight = torch.zeros(2, k, dtype=BF16), torch.zeros(8, k, dtype=BF16)
    with pytest.raises(ValueError, match=f"{num_parts} parts: {k} columns"):
        matmul(x, weight, None, BF16, num_parts)
