"""Tokens that are dealt out among ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_rl.kernels.attention.shared_tokens import SharedTokens


def dealt(count: int, size: int) -> list[SharedTokens]:
    groups: list[Any] = [
        SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size) for rank in range(size)
    ]
    return [SharedTokens(count, group) for group in groups]


@pytest.mark.parametrize(("count", "size"), [(8, 2), (9, 2), (12, 4), (13, 4), (1, 4)])
def test_rows_of_all_ranks_are_the_tokens_in_turn(count: int, size: int) -> None:
    x = torch.arange(1, count + 1)
    ranks = dealt(count, size)
    whole = torch.stack([one.own_rows(x) for one in ranks], 1).flatten()
    assert whole.tolist() == x.tolist() + [0] * (len(whole) - count)
    assert [len(one.own(x)) for one in ranks] == [one.num_own for one in ranks]


@pytest.mark.parametrize(("count", "size"), [(8, 2), (9, 2), (12, 4), (13, 4)])
def test_rows_lie_side_by_side(count: int, size: int) -> None:
    """Kernels of a GPU read positions without asking for their stride."""
    x = torch.arange(count)
    for one in dealt(count, size):
        assert one.own(x).is_contiguous() and one.own_rows(x).is_contiguous()
