"""The reference is the policy at step 0, or the recipe is told where they differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.algo.self_check import check_reference
from spmd_rl.errors import ContractError
from spmd_rl.types.token_values import TokenValues

SCORES = TokenValues(
    np.linspace(-3, -1, 9).astype(np.float32),
    np.array([4, 5], np.int32),
    np.array([7, 3], np.int32),
)


def changed(token: int, value: float) -> TokenValues:
    values = SCORES.values.copy()
    values[token] = value
    return replace(SCORES, values=values)


def test_equal_scores_pass() -> None:
    check_reference(SCORES, replace(SCORES, values=SCORES.values.copy()))
    nothing = np.zeros(0, np.int32)
    empty = TokenValues(nothing.astype(np.float32), nothing, nothing)
    check_reference(empty, empty)


@pytest.mark.parametrize("value", [-1.25, float("nan")])
def test_the_largest_difference_is_named(value: float) -> None:
    with pytest.raises(ContractError, match=r"nats at token 2 of sequence 3$"):
        check_reference(SCORES, changed(6, value))
    with pytest.raises(ContractError, match=r"nats at token 3 of sequence 7$"):
        check_reference(changed(3, value), SCORES)


def test_a_tolerance_allows_a_difference() -> None:
    check_reference(SCORES, changed(6, float(SCORES.values[6]) + 0.1), tolerance=0.2)


def test_scores_of_another_batch_are_refused() -> None:
    other = replace(SCORES, lengths=np.array([5, 4], np.int32))
    with pytest.raises(ContractError, match="scored different batches"):
        check_reference(SCORES, other)
