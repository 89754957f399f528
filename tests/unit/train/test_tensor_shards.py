"""Gradients of ranks that share matrices: what all have whole is counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from spmd_rl.train.fsdp2.tensor_shards import TensorShards


def counted(rank: int) -> list[int]:
    """Return how many elements a rank counts of a parameter that is cut, and of one that is not."""
    shards: Any = SimpleNamespace(part=SimpleNamespace(index=rank))
    gradients = {"matrix": torch.ones(3, 2), "norm": torch.ones(5)}
    return [one.numel() for one in TensorShards.counted(shards, gradients, {"norm"})]


def test_the_first_rank_counts_what_each_has_whole() -> None:
    assert [counted(rank) for rank in range(3)] == [[6, 5], [6, 0], [6, 0]]
