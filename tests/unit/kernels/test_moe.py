"""Mixtures of experts: the choice of experts, and bits that depend on no other token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spmd_rl.kernels.moe.route_hash import hashed_routes, note_routes
from spmd_rl.kernels.moe.router import load_of, route
from spmd_rl.kernels.moe.slots import by_expert, from_experts, to_experts
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp

HIDDEN = 20


def mixture(experts: int, chosen: int, size: int = 12, *, normalizes: bool = True) -> MoeMlp:
    module = Moe(HIDDEN, experts, chosen, size, normalizes).module(0)
    assert isinstance(module, MoeMlp)
    generator = torch.Generator().manual_seed(experts)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def in_float64(module: MoeMlp, x: Tensor) -> Tensor:
    """Every expert for every token, weighed by zero where it was not chosen."""
    wide = module.double()
    x = x.double()
    probabilities = (x @ wide.gate.weight.T).softmax(-1)
    best = probabilities.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(probabilities).scatter(1, best[:, : module.experts_per_token], 1.0)
    weights = probabilities * chosen
    if module.normalizes_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    outs = []
    for one in wide.experts:
        gate, up, down = (getattr(one, f"{name}_proj").weight for name in ("gate", "up", "down"))
        outs.append((torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return (weights.unsqueeze(2) * torch.stack(outs, 1)).sum(1)


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda two: (max(two), min(two)))


@given(SIZES, st.integers(1, 40), st.booleans(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_outputs_and_gradients_are_those_of_float64(
    sizes: tuple[int, int], tokens: int, normalizes: bool, seed: int
) -> None:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    given_x, wide_x = x.clone().requires_grad_(), x.double().requires_grad_()
    ours, wide = (mixture(*sizes, normalizes=normalizes) for _ in range(2))
    pull = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    found, expected = ours(given_x), in_float64(wide, wide_x)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    (found * pull).sum().backward()
    (expected * pull.double()).sum().backward()
    # The router's gradient is a difference of these products, so its error is one of theirs.
    products = pull.norm(dim=1) * expected.norm(dim=1) * x.norm(dim=1)
    pairs = zip(ours.parameters(), wide.parameters(), strict=True)
    for one, other in [(given_x, wide_x), *pairs]:
        assert one.grad is not None
        gradient = torch.zeros_like(other) if other.grad is None else other.grad
        size = products.norm() / 20 if one is ours.gate.weight else 1 + gradient.norm()
        assert (one.grad.double() - gradient).norm() <= 2e-5 * size


@given(SIZES, st.integers(1, 50), st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bits_among_any_others(
    sizes: tuple[int, int], tokens: int, data: Any
) -> None:
    module = mixture(*sizes, size=data.draw(st.sampled_from([12, 13, 32])))
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    order = data.draw(st.permutations(range(tokens)))
    rows = torch.tensor(order[: data.draw(st.integers(1, tokens))])
    with torch.no_grad():
        whole, part = padded(module, x), padded(module, x[rows])
    assert torch.equal(part, whole[rows])
    assert torch.equal(padded(module, x).detach(), whole), "with gradients"


def padded(module: MoeMlp, x: Tensor) -> Tensor:
    """As the network calls it: rows in multiples of a tile."""
    tall = torch.zeros(-(-len(x) // 16) * 16, HIDDEN)
    tall[: len(x)] = x
    out: Tensor = module(tall)[: len(x)]
    return out


def test_the_sum_over_slots_has_an_order() -> None:
    """A negative control: added in another order, some bits differ."""
    seeded = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 3, 64 * 8).unsqueeze(1)
    y = torch.randn(64 * 8, HIDDEN, generator=seeded) * sizes
    ids = torch.rand(64, 16, generator=seeded).argsort(1)[:, :8].sort(1).values
    order = by_expert(ids, 16)
    found = from_experts(y, order)
    turned = from_experts(y, order._replace(rows=order.rows.flip(1)))
    assert not torch.equal(found, turned)
    largest = y.abs().max()
    torch.testing.assert_close(found / largest, turned / largest)


def test_ties_go_to_lower_ids_and_slots_are_in_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    routes = route(logits, 3, normalizes=True)
    assert routes.ids.tolist() == [[0, 1, 3], [0, 1, 4]]
    torch.testing.assert_close(routes.weights.sum(1), torch.ones(2))
    plain = route(logits, 3, normalizes=False)
    torch.testing.assert_close(plain.weights, logits.softmax(-1).gather(1, plain.ids))


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
@settings(deadline=None)
def test_rows_go_to_their_experts_and_come_back(
    tokens: int, experts: int, chosen: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = min(chosen, experts)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :count].sort(1).values
    order = by_expert(ids, experts)
    assert order.counts == load_of(ids, experts).tolist()
    assert sum(order.counts) == tokens * count
    x = torch.arange(float(tokens)).unsqueeze(1).expand(tokens, 3).contiguous()
    rows = to_experts(x, order)
    assert rows[:, 0].tolist() == order.tokens.tolist()
    of_expert = ids.flatten()[order.slots]
    assert (of_expert.diff() >= 0).all()
    for expert in range(experts):  # of one expert, in the order of tokens
        assert (order.tokens[of_expert == expert].diff() > 0).all()
    torch.testing.assert_close(from_experts(rows, order), x * count)


@pytest.mark.parametrize("skew", ["all to one", "some without tokens"])
def test_gradients_reach_every_expert(skew: str) -> None:
    """Ranks of a data-parallel trainer must reduce the same gradients, whoever has which tokens."""
    module = mixture(6, 1)
    with torch.no_grad():
        module.gate.weight.zero_()
        if skew == "some without tokens":
            module.gate.weight[2:4] = torch.randn(2, HIDDEN)
    module(torch.randn(16, HIDDEN)).sum().backward()
    assert all(one.grad is not None for one in module.parameters())
    assert not module.experts[5].down_proj.weight.grad.any()


def test_routes_are_hashed_row_by_row_over_all_layers() -> None:
    first, second = (torch.rand(9, 12).argsort(1)[:, :4].sort(1).values for _ in range(2))
    rows = torch.tensor([7, 2])

    def found(*layers: Tensor) -> list[int]:
        with hashed_routes() as routes:
            for ids in layers:
                note_routes(ids)
        hashes = routes.of_rows(rows)
        assert hashes is not None
        assert hashes.dtype == torch.int32
        return hashes.tolist()

    whole = found(first, second)
    assert found(first[:8], second[:8]) == whole, "other rows do not count"
    flipped = second.clone()
    flipped[2, 3] += 1
    assert found(first, flipped)[0] == whole[0]
    assert found(first, flipped)[1] != whole[1]
    assert found(second, first) != whole
    assert found(second) != whole


def test_nothing_is_hashed_without_experts_or_outside() -> None:
    with hashed_routes() as routes:
        pass
    note_routes(torch.zeros(3, 2, dtype=torch.int64))
    assert routes.of_rows(torch.tensor([0])) is None
