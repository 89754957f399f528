"""Experts chosen by sigmoids, in groups: the choice, its weights, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels.moe.sigmoid_router import route_by_sigmoid

SIZES = st.tuples(st.integers(1, 5), st.integers(2, 5)).flatmap(
    lambda sizes: st.tuples(
        st.just(sizes[0]), st.just(sizes[1]), st.integers(1, sizes[0]), st.integers(0, 99)
    )
)


def by_hand(
    logits: list[float], correction: list[float], num_chosen: int, groups: tuple[int, int]
) -> list[int]:
    """The experts of one token, by sorting."""
    scores = [1 / (1 + 2.718281828459045**-x) for x in logits]
    ranked = [score + shift for score, shift in zip(scores, correction, strict=True)]
    size = len(ranked) // groups[0]
    parts = [range(first, first + size) for first in range(0, len(ranked), size)]
    best = sorted(parts, key=lambda part: -sum(sorted(ranked[one] for one in part)[-2:]))
    allowed = [one for part in best[: groups[1]] for one in part]
    return sorted(sorted(allowed, key=lambda one: -ranked[one])[:num_chosen])


@given(SIZES, st.integers(1, 40), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_choice_weights_and_gradients(
    sizes: tuple[int, int, int, int], tokens: int, normalizes: bool, data: Any
) -> None:
    num_groups, in_group, chosen_groups, seed = sizes
    count = data.draw(st.integers(1, chosen_groups * in_group))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, num_groups * in_group, generator=generator) * 3
    correction = torch.randn(num_groups * in_group, generator=generator) * 0.2
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    routes = route_by_sigmoid(
        leaf,
        correction,
        count,
        groups=(num_groups, chosen_groups),
        normalizes=normalizes,
        scale=1.5,
    )
    expected = [
        by_hand(row, correction.tolist(), count, (num_groups, chosen_groups))
        for row in logits.tolist()
    ]
    assert routes.ids.tolist() == expected
    weights = wide.sigmoid().gather(1, routes.ids)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weights.double(), 1.5 * weights, rtol=1e-5, atol=1e-6)
    pull = torch.randn(tokens, count, generator=generator)
    (routes.weights * pull).sum().backward()
    (1.5 * weights * pull).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def rows_alone(logits: Tensor) -> list[Tensor]:
    named: dict[str, Any] = {"groups": (2, 1), "normalizes": True, "scale": 2.5}
    correction = torch.linspace(-0.1, 0.1, logits.shape[1])
    whole = route_by_sigmoid(logits, correction, 3, **named)
    parts = [route_by_sigmoid(row[None], correction, 3, **named) for row in logits]
    return [
        torch.cat([getattr(one, kind) for one in parts]) == getattr(whole, kind)
        for kind in ("ids", "weights")
    ]


@pytest.mark.parametrize("experts", [6, 10, 34])
def test_a_row_has_the_same_bits_alone(experts: int) -> None:
    logits = torch.randn(301, experts) * 4
    with torch.no_grad():
        assert all(same.all() for same in rows_alone(logits))


def test_ties_go_to_lower_ids_and_to_lower_groups() -> None:
    logits = torch.zeros(1, 6)
    routes = route_by_sigmoid(logits, torch.zeros(6), 2, groups=(3, 2), normalizes=False, scale=1.0)
    assert routes.ids.tolist() == [[0, 1]]
    shifted = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.1, 0.0])
    routes = route_by_sigmoid(logits, shifted, 3, groups=(3, 2), normalizes=False, scale=1.0)
    assert routes.ids.tolist() == [[2, 3, 4]]
    assert routes.weights.tolist() == [[0.5, 0.5, 0.5]], "the correction is no part of them"


def test_large_logits_have_finite_gradients() -> None:
    logits = torch.tensor([[-3e4, -90.0, 90.0, 3e4]], requires_grad=True)
    routes = route_by_sigmoid(logits, torch.zeros(4), 4, groups=(1, 1), normalizes=True, scale=1.0)
    (routes.weights * torch.tensor([1.0, 2.0, 3.0, 5.0])).sum().backward()
    assert torch.isfinite(routes.weights).all() and torch.isfinite(logits.grad).all()
