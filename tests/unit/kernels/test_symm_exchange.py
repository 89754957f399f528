"""Sums and columns by the memory of peers: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import rounded
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours

pytest.importorskip("triton")

from spmd_rl.kernels.linear import peer_sums_triton
from spmd_rl.kernels.linear.peer_sums_triton import PeerBuffers
from tests.unit.kernels.compiled import compiled_of, instructions
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.exchange_calls"
CALLS_OF_A_RANK, ROWS, COLUMNS = 3, 4, 40  # three rows fit a buffer there


@pytest.fixture(autouse=True, scope="module")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def drawn(num_ranks: int, columns: int = COLUMNS) -> Tensor:
    generator = torch.Generator().manual_seed(num_ranks)
    shape = num_ranks, CALLS_OF_A_RANK, ROWS, columns
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -3, 3, shape, generator=generator
    )


def wanted(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `TorchExchange` gives every rank."""
    total = sum_neighbours(list(parts.clone()))
    return rounded(total, bias, dtype).expand(len(parts), *total.shape)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sums_have_the_bits_of_the_reference(num_ranks: int, tmp_path: Path) -> None:
    """Call behind call, in tiles, by ranks that come to their barriers in any order.

    In float16, as the interpreter does not round to bfloat16.
    """
    parts, bias = drawn(num_ranks), torch.randn(COLUMNS).half()
    ways = [(None, torch.float32), (bias, torch.float16)]
    calls = Calls(CALLS, "summed", {}, [(parts, *way) for way in ways])
    for found, way in zip(results(calls, tmp_path), ways, strict=True):
        assert torch.equal(found, wanted(parts, *way))


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_large_sums_have_them_too(num_ranks: int, tmp_path: Path) -> None:
    """Each rank sums a share; calls with more rows are large, and those between them are not."""
    parts, bias = drawn(num_ranks), torch.randn(COLUMNS).half()
    large, few = parts[0, 0].nbytes, parts.clone()[:, :, :2]
    ways = [(None, torch.float32), (bias, torch.float16)]
    calls = [(one, *way, True, large) for one in (parts, few) for way in ways]
    found = results(Calls(CALLS, "summed", {}, calls), tmp_path)
    for one, (given, *way, _, _) in zip(found, calls, strict=True):
        assert torch.equal(one, wanted(given, *way))
    mixed = Calls(CALLS, "mixed", {}, [(parts, few, large)])
    for one, given in zip(results(mixed, tmp_path)[0], (parts, few), strict=True):
        assert torch.equal(one, wanted(given, None, torch.float32))


def test_controls_of_another_order_and_of_one_buffer_differ(tmp_path: Path) -> None:
    """A rank that puts into the buffer that others still read changes their sums."""
    parts, way = drawn(4)[:, :, :3], (None, torch.float32)
    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(wanted(parts, *way)[0], in_order)
    (found,) = results(Calls(CALLS, "summed", {}, [(parts, *way, False)]), tmp_path)
    assert not torch.equal(found, wanted(parts, *way))


def test_columns_are_those_of_all_ranks(tmp_path: Path) -> None:
    num_ranks = 4
    own, parts = drawn(num_ranks, 33), drawn(num_ranks)[:, 0]
    numbers = torch.arange(num_ranks * CALLS_OF_A_RANK).view(num_ranks, -1, 1, 1) + (1 << 40)
    calls = Calls(CALLS, "gathered", {}, [(own, parts), (numbers, parts)])
    for found, given in zip(results(calls, tmp_path), (own, numbers), strict=True):
        columns = torch.cat(list(given), -1)
        assert torch.equal(found, columns.expand(num_ranks, *columns.shape))


def test_rows_longer_than_a_buffer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        results(Calls(CALLS, "summed", {}, [(drawn(2, 300), None, torch.float32, True)]), tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sums_code_fuses_nothing_and_reads_16_bytes_at_once(num_ranks: int) -> None:
    own = torch.zeros(2, 1 << 21, dtype=torch.int32)
    peers, turns = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    buffers = PeerBuffers(own, peers, turns)
    out, bias = torch.zeros(16, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    compiled = compiled_of(
        peer_sums_triton._sum_of_peers, lambda: peer_sums_triton.sum_of_peers(out, bias, buffers)
    )
    found = instructions(compiled.asm["ptx"])
    assert not [one for one in found if one.startswith(("fma", "red", "atom"))]
    assert sum(count for one, count in found.items() if "ld.global.v4" in one) >= 2 * num_ranks
    assert any(one.startswith("cvt.rn.bf16") for one in found)
    share = compiled_of(
        peer_sums_triton._sum_own_share,
        lambda: peer_sums_triton.sum_own_share((16, 4096), 1, bias, torch.bfloat16, buffers),
    )
    found = instructions(share.asm["ptx"])
    assert not [one for one in found if one.startswith(("fma", "red", "atom"))]
    shares = compiled_of(
        peer_sums_triton._shares_of_peers, lambda: peer_sums_triton.shares_of_peers(out, buffers)
    )
    assert instructions(shares.asm["ptx"])["st.global.v4.b32"] > 0
    words = torch.zeros(16, 4096, dtype=torch.int32)
    compiled = compiled_of(peer_sums_triton._put, lambda: peer_sums_triton.put(words, buffers))
    assert instructions(compiled.asm["ptx"])["st.global.v4.b32"] > 0
    compiled_of(
        peer_sums_triton._columns_of_peers,
        lambda: peer_sums_triton.columns_of_peers(words, buffers),
    )
