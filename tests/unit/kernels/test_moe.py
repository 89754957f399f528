"""Mixtures of experts: the choice of experts, and bits that depend on no other token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spmd_rl.kernels.moe.route_hash import RouteHash, hashed_routes, note_routes
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


def bfloat16(x: Tensor) -> Tensor:
    """Round once to bfloat16, and go on in float64."""
    return x.float().bfloat16().double()


def dense_in_steps(mlp: nn.Module, x: Tensor) -> Tensor:
    """Return what goes into the down projection, rounded as docs/experts.md says."""
    gate, up = (
        bfloat16(x @ getattr(mlp, name).weight.double().T) for name in ("gate_proj", "up_proj")
    )
    return bfloat16(torch.nn.functional.silu(gate) * up)


def in_steps(module: MoeMlp, x: Tensor, *, mistake: str = "") -> Tensor:
    """Return a mixture's output in float64, rounded where docs/experts.md says, token by token."""
    x = x.double()
    rows = []
    for token in x:
        probabilities = (module.gate.weight.double() @ token).float().softmax(-1)
        best = sorted(range(module.num_experts), key=lambda one: (-float(probabilities[one]), one))
        ids = sorted(best[: module.experts_per_token])
        weights = probabilities[ids]
        weights = weights / weights.sum() if module.normalizes_weights else weights
        total = torch.zeros(HIDDEN)
        for number, weight in zip(ids, weights, strict=True):
            expert = module.experts[number]
            down = expert.down_proj.weight.double()
            product = (dense_in_steps(expert, token) @ down.T).float()
            product = product.bfloat16().float() if mistake == "product" else product
            slot = (product * weight).bfloat16().float()
            total = total + slot
            total = total.bfloat16().float() if mistake == "sum" else total
        rows.append(bfloat16(total))
    routed = torch.stack(rows)
    shared = module.shared_experts
    if shared is None or mistake == "shared":
        return routed
    hidden = dense_in_steps(shared, x)
    return bfloat16(routed + bfloat16(hidden @ shared.down_proj.weight.double().T))


@pytest.mark.parametrize("shared", [0, 12])
def test_a_mixture_in_bfloat16_is_rounded_where_the_page_says(shared: int) -> None:
    module = Moe(HIDDEN, 8, 4, 12, shared_size=shared).module(0)
    assert isinstance(module, MoeMlp)
    generator = torch.Generator().manual_seed(8)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    module = module.bfloat16()
    x = torch.randn(64, HIDDEN, generator=generator).bfloat16()
    with torch.no_grad():
        found = module(x)
        assert found.dtype == torch.bfloat16

        def unequal(mistake: str) -> float:
            return float((in_steps(module, x, mistake=mistake) != found.double()).double().mean())

        # sums in fp32 are not those in float64, which seldom shows in bfloat16
        assert unequal("") < 0.005
        for mistake in ["product", "sum", *(["shared"] if shared else [])]:  # the control
            assert unequal(mistake) > 0.05, mistake


@pytest.mark.parametrize("through", ["forward", "backward"])
def test_slots_are_added_in_float32_and_rounded_once(through: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(50, 9, generator=generator).argsort(1)[:, :6].sort(1).values
    order = by_expert(ids, 9)
    y = torch.randn(300, HIDDEN, generator=generator).bfloat16()
    if through == "forward":
        found = from_experts(y, order)
    else:
        x = torch.zeros(50, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        to_experts(x, order).backward(y)
        assert x.grad is not None
        found = x.grad
    expected, rounded = torch.zeros(50, HIDDEN), torch.zeros(50, HIDDEN)
    for slot in order.rows.unbind(1):
        expected += y[slot].float()
        rounded = (rounded + y[slot].float()).bfloat16().float()
    assert torch.equal(found, expected.bfloat16())
    assert not torch.equal(found, rounded.bfloat16()), "the control"


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


def test_a_hash_is_that_of_whole_numbers() -> None:
    """An expert 0 that comes first counts, as any other."""
    layers = [[[0, 3], [1, 2]], [[0, 1], [0, 2]], [[2, 3], [0, 1]]]

    def in_python(row: int) -> int:
        state = 0
        for layer in layers:
            for slot in layer[row]:
                state = (state + slot + 1) * 6364136223846793005 % 2**64
                signed = state - (state >> 63 << 64)
                state = (state ^ (signed >> 29)) % 2**64
        signed = state - (state >> 63 << 64)
        short = (signed ^ (signed >> 32)) % 2**32
        return short - (short >> 31 << 32)

    hashed = RouteHash()
    for layer in layers:
        hashed.add(torch.tensor(layer))
    found = hashed.of_rows(torch.arange(2))
    assert found is not None and found.tolist() == [in_python(0), in_python(1)]
    once, twice = RouteHash(), RouteHash()
    once.add(torch.tensor([[0]]))
    for _ in range(2):
        twice.add(torch.tensor([[0]]))
    assert len({0, *once.state.tolist(), *twice.state.tolist()}) == 3  # type: ignore[union-attr]


def test_nothing_is_hashed_without_experts_or_outside() -> None:
    with hashed_routes() as routes:
        pass
    note_routes(torch.zeros(3, 2, dtype=torch.int64))
    assert routes.of_rows(torch.tensor([0])) is None
