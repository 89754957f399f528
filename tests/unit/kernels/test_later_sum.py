"""LaterSum: what is done with it before a norm counts, and nothing is kept behind the norm."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import add_rms_norm
from spmd_rl.kernels.linear.later_sum import LaterSum

RESIDUAL, WEIGHT, EPS = torch.ones(2, 8), torch.ones(8), 1e-6


class Counted:
    """A sum that counts how it is asked for."""

    def __init__(self, part: Tensor) -> None:
        self.part = part
        self.num_taken = self.num_normed = 0

    def take(self) -> Tensor:
        self.num_taken += 1
        return self.part * 2

    def norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.num_normed += 1
        return add_rms_norm(self.part * 2, residual, weight, eps)

    def later(self) -> LaterSum:
        part = self.part
        return LaterSum(part.shape, part.dtype, part.device, self.take, self.norm)


@pytest.fixture
def counted() -> Counted:
    return Counted(torch.randn(2, 8))


def test_a_norm_takes_a_sum_that_nobody_has_taken(counted: Counted) -> None:
    found = add_rms_norm(counted.later(), RESIDUAL, WEIGHT, EPS)
    assert (counted.num_taken, counted.num_normed) == (0, 1)
    for one, expected in zip(found, counted.norm(RESIDUAL, WEIGHT, EPS), strict=True):
        assert torch.equal(one, expected)


def test_a_norm_gets_what_was_changed_in_place(counted: Counted) -> None:
    later = counted.later()
    later += 5
    _, summed = add_rms_norm(later, RESIDUAL, WEIGHT, EPS)
    assert torch.equal(summed, RESIDUAL + (counted.part * 2 + 5))
    assert (counted.num_taken, counted.num_normed) == (1, 0)


def test_ranks_that_read_first_ask_as_often_as_others(counted: Counted) -> None:
    """Each of them meets all others once, whether it has read the sum or not."""
    later = counted.later()
    assert torch.equal(later + 0, counted.part * 2) and torch.equal(later * 1, counted.part * 2)
    add_rms_norm(later, RESIDUAL, WEIGHT, EPS)
    assert counted.num_taken + counted.num_normed == 1


def test_nothing_is_kept_behind_a_norm() -> None:
    counted = Counted(torch.randn(2, 8))
    later, before = counted.later(), weakref.ref(counted)
    add_rms_norm(later, RESIDUAL, WEIGHT, EPS)
    del counted
    gc.collect()
    assert before() is None
    with pytest.raises(RuntimeError, match="taken before"):
        later + 1
