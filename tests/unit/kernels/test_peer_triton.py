"""Rows to and from the memory of peers: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import ExpertBlocks, SlotRows, blocks_of
from spmd_rl.kernels.moe.router import ExpertRoutes, in_slot_order

pytest.importorskip("triton")

from spmd_rl.kernels.moe import peer_triton
from tests.unit.kernels.compiled import compiled_of, instructions
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.peer_calls"
RANKS, ROWS, CHOSEN, EXPERTS, COLUMNS = 4, 5, 3, 8, 70
BLOCKS = ExpertBlocks(EXPERTS, RANKS)


@pytest.fixture(autouse=True, scope="module")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def drawn_ids() -> Tensor:
    """Experts of each rank's rows; one row of the second rank has none."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(RANKS, ROWS, EXPERTS, generator=generator)
    ids = drawn.topk(CHOSEN).indices.sort().values
    ids[1, 2] = EXPERTS
    return ids


def test_every_rank_gets_the_rows_of_all(tmp_path: Path) -> None:
    x, ids = torch.randn(RANKS, ROWS, COLUMNS).half(), drawn_ids()
    weights = torch.rand(RANKS, ROWS, CHOSEN)
    calls = Calls(CALLS, "pushed", {}, [(x, ids, weights, EXPERTS)])
    (memory,) = results(calls, tmp_path)
    for rank, (rows, own, scales) in enumerate(memory):
        assert torch.equal(rows, x.flatten(0, 1))
        assert torch.equal(scales, weights.flatten(0, 1))
        assert torch.equal(own, BLOCKS.local(ids.flatten(0, 1), rank))
        assert own.max() <= BLOCKS.num_own


def test_sums_are_in_slot_order_wherever_slots_lie(tmp_path: Path) -> None:
    ids = drawn_ids()
    slots = torch.randn(RANKS * ROWS, CHOSEN, COLUMNS).half() * 100
    given = []
    for rank in range(RANKS):
        is_own = BLOCKS.local(ids.flatten(0, 1), rank) < BLOCKS.num_own
        rows = torch.full(is_own.shape, -1, dtype=torch.int32)
        rows[is_own] = torch.randperm(int(is_own.sum())).int()
        y = torch.full((RANKS * ROWS * CHOSEN, COLUMNS), torch.nan).half()
        y[rows[is_own].long()] = slots[is_own]
        given.append((y, rows))
    (found,) = results(Calls(CALLS, "summed", {}, [(ids, given, EXPERTS)]), tmp_path)
    has_expert = (ids < EXPERTS).unsqueeze(-1)
    slots = torch.where(has_expert.flatten(0, 1), slots, 0)
    wanted = in_slot_order(slots.float()).half().view(RANKS, ROWS, COLUMNS)
    assert torch.equal(found, wanted)
    rounded = in_slot_order(slots).view(RANKS, ROWS, COLUMNS)
    assert not torch.equal(found, rounded), "sums that are rounded between slots differ"


def test_the_sums_code_fuses_nothing() -> None:
    ids, table = torch.zeros(ROWS, 8, dtype=torch.int64), torch.zeros(RANKS, dtype=torch.int64)
    peers, x = peer_triton.PeerTables(*[table] * 4), torch.zeros(ROWS, 2048, dtype=torch.bfloat16)
    weights = torch.zeros(ROWS, 8)
    compiled = compiled_of(
        peer_triton._sum_peers, lambda: peer_triton.sum_peers(ids, peers, BLOCKS, 1, x)
    )
    found = instructions(compiled.asm["ptx"])
    assert not [one for one in found if one.startswith(("fma", "red", "atom"))]
    routes = ExpertRoutes(ids, weights)
    compiled_of(peer_triton._push, lambda: peer_triton.push(x, routes, peers, BLOCKS, 1))
    given = SlotRows(x.new_zeros(ROWS * 8, 2048), torch.zeros(ROWS, 8, dtype=torch.int32))
    out = x.new_zeros(ROWS, 8, 2048)
    compiled_of(peer_triton._place_slots, lambda: peer_triton.place_slots(given, out))


def test_ranks_that_cannot_share_experts_evenly_are_refused() -> None:
    class Three:
        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="3 ranks cannot share 8 experts evenly"):
        blocks_of(Three(), EXPERTS)  # type: ignore[arg-type]


def test_layers_in_the_memory_of_peers_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Three layers in the same memory, with ranks that come to their barriers in any order.

    One rank rehearses another pass behind each layer, which leaves no trace.
    """
    x, ids = torch.randn(RANKS, ROWS, COLUMNS).half(), drawn_ids()
    weights, experts = torch.rand(RANKS, ROWS, CHOSEN), torch.randn(EXPERTS, COLUMNS)
    calls = Calls("tests.unit.kernels.symm_calls", "gathered", {}, [(x, ids, weights, experts, 3)])
    (found,) = results(calls, tmp_path)
    wanted, of_slots = x, experts[ids.clamp(max=EXPERTS - 1)] * weights.unsqueeze(-1)
    for _ in range(3):
        slots = (wanted.unsqueeze(2).float() * of_slots).half()
        slots = torch.where((ids < EXPERTS).unsqueeze(-1), slots, 0)
        wanted = in_slot_order(slots.flatten(0, 1).float()).half().view_as(x)
    assert torch.equal(found, wanted)
