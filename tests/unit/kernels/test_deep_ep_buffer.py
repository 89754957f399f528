"""What DeepEP's kernel is given, by a stand-in for its buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.moe.deep_ep_buffer import DeepEpBuffer, RankWants


class Receiver:
    """A buffer of one rank, which asserts what the kernel does of the addresses that it gets."""

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, **_: Any
    ) -> tuple[Any, ...]:
        assert has_address(topk_idx) == has_address(topk_weights)
        ends = torch.tensor([[len(x)]], dtype=torch.int32)
        return x, topk_idx, topk_weights, [], (ends,), None


def has_address(tensor: Tensor) -> bool:
    """Whether C++ gets one of a tensor with a type: that of its storage, also without elements."""
    return tensor.untyped_storage().data_ptr() != 0


@pytest.mark.parametrize("number", [0, 3])
def test_no_rows_have_no_address(number: int) -> None:
    buffer = object.__new__(DeepEpBuffer)
    buffer.buffer, buffer._id_dtype, buffer._rank = Receiver(), torch.int64, 0
    x, ids = torch.ones(5, 4)[:number], torch.zeros(5, 2, dtype=torch.int64)[:number]
    assert has_address(ids), "which a slice without rows has too"
    wants = torch.full((1,), number, dtype=torch.int32)
    arrived = buffer.send(x, ids, RankWants(wants, wants, torch.ones(number, 1).bool()), number)
    assert len(arrived.rows) == len(arrived.sources) == number
