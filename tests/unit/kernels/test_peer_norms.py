"""Norms of sums over ranks, in one kernel: in Triton's interpreter, and compiled for Hopper.

A CPU's own norm has another tree, so the kernel of the norm is the reference, behind the products
of one rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import add_rms_norm
from spmd_rl.kernels.linear.shard_exchange import rounded
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours

pytest.importorskip("triton")

from spmd_rl.kernels.linear import peer_norms_triton
from spmd_rl.kernels.linear.peer_norms_triton import NormedRows, norm_of_peers
from spmd_rl.kernels.linear.peer_sums_triton import PeerBuffers
from spmd_rl.kernels.rowwise import norm_triton
from tests.unit.kernels.compiled import compiled_of, instructions, shuffles, spilled_bytes
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.exchange_calls"
ROWS, K = 7, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def drawn(columns: int, dtype: torch.dtype) -> tuple[Any, Tensor, Any]:
    """Operands of a product, its bias, and what its norm takes beside it."""
    generator = torch.Generator().manual_seed(columns)
    shapes = (ROWS, K), (columns, K), (columns,), (ROWS, columns), (columns,)
    x, weight, bias, residual, scale = (
        torch.randn(shape, generator=generator).to(dtype) for shape in shapes
    )
    return (x, weight), bias, (residual, scale)


def of_ranks(operands: tuple[Tensor, Tensor], num_ranks: int) -> tuple[Tensor, ...]:
    """What each rank has of the operands. Shape: [P, ..., K / P]."""
    return tuple(torch.stack(one.chunk(num_ranks, 1)) for one in operands)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_ranks_have_the_bits_of_one_rank_and_its_norm(shards: int, tmp_path: Path) -> None:
    """In turns of the buffers, and in float16: the interpreter does not round to bfloat16."""
    calls, wanted = [], []
    cases = [(100, torch.float16, True), (40, torch.float32, False), (128, torch.float16, False)]
    for columns, dtype, has_bias in cases if shards == 8 else cases[:1]:
        operands, bias, norm = drawn(columns, dtype)
        given = (bias if has_bias else None), norm, shards
        wanted.append((operands, *given))
        sizes = [size for size in (2, 4, 8) if size <= shards]
        calls += [(of_ranks(operands, size), *given) for size in sizes]
    found = results(Calls(CALLS, "normed", {}, calls), tmp_path)
    alone = results(Calls(CALLS, "normed_alone", {}, wanted), tmp_path)
    each = len(found) // len(alone)
    assert each == {2: 1, 4: 2, 8: 3}[shards]
    for index, one in enumerate(found):
        assert torch.equal(one, alone[index // each].expand_as(one))


def test_a_tree_of_another_shape_has_other_bits(tmp_path: Path) -> None:
    """Negative control: four parts, one after the other."""
    operands, _, norm = drawn(100, torch.float32)
    calls = [(operands, None, norm, 4, in_order) for in_order in (False, True)]
    ours, in_order = results(Calls(CALLS, "normed_alone", {}, calls), tmp_path)
    assert 0.05 < (ours != in_order).float().mean() < 0.9


def test_others_than_a_norm_get_the_sum(tmp_path: Path) -> None:
    """The norm of a large sum is a kernel of its own: a CPU's here."""
    parts = torch.randn(8, ROWS, 40)
    calls = [(parts, torch.float32, large) for large in (parts[0].nbytes, 1 << 20)]
    total = rounded(sum_neighbours(list(parts.clone())), None, torch.float32)
    normed, _ = add_rms_norm(total, parts[0], parts[0, 0], 1e-6)
    large, usual = results(Calls(CALLS, "taken", {}, calls), tmp_path)
    assert torch.equal(large, torch.stack([total * 2, total, normed]).expand_as(large))
    assert torch.equal(usual[:, :2], large[:, :2])


def test_a_model_has_the_logits_of_any_number_of_ranks(tmp_path: Path) -> None:
    """And others if it sums in other parts: the negative control."""
    calls = [(num_ranks, 4) for num_ranks in (2, 4)] + [(2, 2)]
    two, four, control = results(Calls(CALLS, "logits", {}, calls), tmp_path)
    assert torch.equal(two, four[:2]) and torch.equal(two[0], four[3])
    assert two.std() > 0.1
    torch.testing.assert_close(two, control, atol=1e-3, rtol=1e-3)
    assert not torch.equal(two, control)


def compiled(size: int, num_ranks: int, dtype: torch.dtype, bias: Tensor | None = None) -> Any:
    own = torch.zeros(2, 1 << 21, dtype=torch.int32)
    peers, turns = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    every = NormedRows(*(torch.zeros(300, size, dtype=dtype) for _ in range(3)))
    weight, buffers = torch.zeros(size, dtype=dtype), PeerBuffers(own, peers, turns)
    return compiled_of(
        peer_norms_triton._norm_of_peers,
        lambda: norm_of_peers(every, range(8, 300), bias, weight, 1e-6, buffers),
    )


def norm_alone(size: int, dtype: torch.dtype) -> Any:
    x, weight = torch.zeros(300, size, dtype=dtype), torch.zeros(size, dtype=dtype)
    return compiled_of(
        norm_triton._forward, lambda: norm_triton.add_rms_norm_forward(x, x, weight, 1e-6)
    )


def layout_of_sums(compiled: Any) -> str:
    """The layout of what a norm squares and sums: where each element of a tile is."""
    code = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    (name,) = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<\w+, (#\w+)>\)', code, re.DOTALL)
    return layouts[name]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(96, BF16), (1000, BF16), (2560, BF16), (4096, BF16), (5120, BF16), (1000, torch.float32)],
)
def test_rows_are_summed_along_the_tree_of_the_norm(
    num_ranks: int, size: int, dtype: torch.dtype
) -> None:
    """The same elements in a thread, the same threads, and nothing fused or spilled."""
    bias = torch.zeros(size, dtype=dtype)
    for fused in (compiled(size, num_ranks, dtype), compiled(size, num_ranks, dtype, bias)):
        alone, ptx = norm_alone(size, dtype), fused.asm["ptx"]
        assert layout_of_sums(fused) == layout_of_sums(alone)
        assert shuffles(ptx) == shuffles(alone.asm["ptx"])
        found = instructions(ptx)
        assert not [one for one in found if one.startswith(("fma", "red", "atom"))]
        assert sum(count for one, count in found.items() if "ld.global.v4" in one) > num_ranks
        assert spilled_bytes(ptx) == 0


def test_another_layout_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = layout_of_sums(norm_alone(4096, BF16))
    monkeypatch.setattr(peer_norms_triton, "NUM_WARPS", 8)
    assert layout_of_sums(compiled(4096, 4, BF16)) != ours
