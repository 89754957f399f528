"""Scores that ranks which share sequences exchange: each rank's own bits, also those of -0.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.train.fsdp2.sequence_shards import OwnRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_sum_of_ranks_keeps_each_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    own = torch.tensor([-0.0, 0.0, -1.5, 1e-45, float("nan"), float("-inf")])
    own = own if dtype == torch.float32 else torch.tensor([-(2**31), 2**31 - 1, -1, 0, 1, 7]).int()
    chosen = torch.tensor([1, 3, 4, 6, 8, 9])

    def sum_with_another_rank(tensor: Tensor, **_: Any) -> None:
        """The other rank has zeros where this one has scores, and scores elsewhere."""
        others = torch.full((10,), 2.5 if tensor.is_floating_point() else 1075838976)
        others[chosen] = 0
        tensor.add_(others.to(tensor.dtype).view_as(tensor))

    monkeypatch.setattr(dist, "all_reduce", sum_with_another_rank)
    rows: Any = OwnRows(None, chosen, 10, None)  # type: ignore[arg-type]
    found = rows.joined(own)
    assert torch.equal(found[chosen].view(torch.int32), own.view(torch.int32))
    others = [place for place in range(10) if place not in chosen.tolist()]
    assert (found.view(torch.int32)[others] == 1075838976).all()
