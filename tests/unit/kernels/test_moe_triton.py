"""A mixture's GPU kernels in Triton's interpreter, against the experts one by one, and by rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spmd_rl.kernels.moe.route_hash import RouteHash, hashed_routes
from spmd_rl.kernels.moe.router import route
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.lora import LoraConfig

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.moe_calls"
# hidden, experts, experts of a token, inner; tokens, rank of adapters, shared, normalizes
LAYERS = [
    ((20, 5, 2, 12), 17, 0, 0, True),  # tiles that end inside a matrix
    ((40, 6, 3, 24), 26, 0, 0, False),  # several tiles along every axis, several chunks of slots
    ((32, 8, 2, 16), 3, 0, 0, True),  # experts without tokens
    ((32, 8, 3, 16), 1, 0, 0, True),  # one token, whose order is that of its experts
    ((24, 4, 2, 16), 12, 3, 0, True),
    ((24, 4, 2, 16), 1, 3, 0, True),  # the same with adapters
    ((24, 6, 2, 16), 9, 0, 20, True),  # a router of sigmoids, and a shared expert
]


def mixture(sizes: tuple[int, ...], normalizes: bool, rank: int = 0, shared: int = 0) -> MoeMlp:
    sigmoid = SigmoidRouter(2, 1, 2.5) if shared else None
    module = Moe(*sizes, normalizes, shared, sigmoid).module(0)
    assert isinstance(module, MoeMlp)
    for expert in module.experts if rank else ():
        for layer in expert.children():
            layer.adapt(rank, LoraConfig(rank=rank).scale)
    generator = torch.Generator().manual_seed(sum(sizes))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_outputs_and_gradients_are_those_of_one_expert_after_the_other(tmp_path: Path) -> None:
    calls, wanted = [], []
    for sizes, tokens, rank, shared, normalizes in LAYERS:
        module = mixture(sizes, normalizes, rank, shared)
        state = {name: one.detach().clone() for name, one in module.named_parameters()}
        x, pull = drawn(tokens, sizes[0]), drawn(tokens, sizes[0], seed=1)
        calls.append((sizes, normalizes, state, rank, shared, x.clone(), pull))
        with hashed_routes() as hashed:
            out = module(x.requires_grad_())
        out.backward(pull)
        named = module.named_parameters()
        gradients = {name: one.grad for name, one in named if one.requires_grad}
        outs = {"out": out.detach(), "alone": out.detach(), "hash": hashed.state, "x": x.grad}
        wanted.append({**outs, **gradients})
    found = results(Calls(CALLS, "forward_and_gradients", {}, calls), tmp_path)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_experts_with_biases_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    calls, wanted = [], []
    for sizes, tokens in (((24, 6, 2, 16), 21), ((32, 4, 3, 40), 5), ((16, 5, 2, 16), 1)):
        module = Moe(*sizes, biases=True, limit=1.5).module(0)
        assert isinstance(module, MoeMlp)
        for number, parameter in enumerate(module.parameters()):
            parameter.data = drawn(*parameter.shape, seed=number) * 0.7
        state = {name: one.detach().clone() for name, one in module.named_parameters()}
        x, pull = drawn(tokens, sizes[0]), drawn(tokens, sizes[0], seed=1)
        calls.append((sizes, True, state, 0, 0, x.clone(), pull, 1.5))
        out = module(x.requires_grad_())
        out.backward(pull)
        gradients = {name: one.grad for name, one in module.named_parameters()}
        wanted.append({"out": out.detach(), "alone": out.detach(), "x": x.grad, **gradients})
    found = results(Calls(CALLS, "forward_and_gradients", {}, calls), tmp_path)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() - {"hash"} == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_codes_have_the_bits_of_what_they_stand_for(tmp_path: Path) -> None:
    """Over several blocks of both weights, with experts without tokens, and for one token."""
    calls = []
    for name, tokens in (("e4m3", 12), ("e4m3", 2), ("e4m3", 1), ("int4", 12), ("int4", 1)):
        sizes = (136, 5, 2, 144)
        module = mixture(sizes, True)
        for number, expert in enumerate(module.experts):  # scales far apart
            for weight, one in expert.named_parameters():
                one.data[:, 128:] *= 2.0 ** (number - (9 if "down" in weight else 3))
        state = {name: one.detach().clone() for name, one in module.named_parameters()}
        calls.append((name, sizes, state, drawn(tokens, sizes[0])))
    for codes, decoded in results(Calls(CALLS, "coded_output", {}, calls), tmp_path):
        assert codes.isfinite().all() and codes.any()
        assert torch.equal(codes, decoded)


def test_a_rows_bits_depend_on_no_other_row(tmp_path: Path) -> None:
    """Unused rows give zeros, touch no expert, and do not change the others."""
    sizes = (24, 6, 2, 16)
    state = {name: one.detach() for name, one in mixture(sizes, True).named_parameters()}
    x, used = drawn(21, 24), torch.arange(21) % 3 - 1
    x[used < 0] = float("nan")
    one, unused = x[1:2], torch.tensor([-1])
    calls = [(sizes, state, x, used), (sizes, state, one, unused), (sizes, state, one, used[1:2])]
    (whole, some), (none, _), (alone, _) = results(Calls(CALLS, "padded", {}, calls), tmp_path)
    assert torch.equal(whole[used >= 0], some)
    assert not whole[used < 0].any()
    assert not none.any()
    torch.testing.assert_close(alone, whole[1:2])  # torch's product of one row has other bits here


ORDERS = [(5, 6, 2, 16, 64), (40, 9, 3, 16, 64), (70, 128, 8, 16, 256), (64, 3, 3, 32, 64)]


def test_slots_are_ordered_by_expert_and_then_by_token(tmp_path: Path) -> None:
    """Tokens, experts, experts of a token, rows of a tile, slots of a chunk; one token has none."""
    calls = []
    for tokens, experts, chosen, tile_rows, chunk in ORDERS:
        ids = drawn(tokens, experts).argsort(1)[:, :chosen].sort(1).values
        ids[tokens // 2] = experts
        calls.append((ids, experts, tile_rows, chunk))
    found = results(Calls(CALLS, "ordered", {}, calls), tmp_path)
    for (ids, experts, tile_rows, _), (slots, rows, starts, tiles) in zip(
        calls, found, strict=True
    ):
        flat = ids.flatten()
        wanted = flat.argsort(stable=True)
        assert torch.equal(slots.long(), wanted)
        row_of_slot = torch.empty_like(wanted)
        row_of_slot[wanted] = torch.arange(len(wanted))
        assert torch.equal(rows.flatten().long(), row_of_slot.where(flat < experts, -1))
        counts = flat.bincount(minlength=experts + 1).tolist()
        assert starts.tolist() == [sum(counts[:one]) for one in range(experts + 1)]
        number, most = int(tiles[0]), len(tiles) // 2
        assert number <= most
        of_tile, first_row = (tiles[at:][:number].tolist() for at in (1, 1 + most))
        assert list(zip(of_tile, first_row, strict=True)) == [
            (one, int(starts[one]) + first)
            for one in range(experts)
            for first in range(0, counts[one], tile_rows)
        ]


def test_routes_weights_hash_and_gradients_are_the_routers(tmp_path: Path) -> None:
    given = [(6, 2, True), (9, 3, False), (128, 8, True), (1, 1, True), (5, 5, False)]
    calls = [(drawn(7, experts), chosen, normal, None) for experts, chosen, normal in given]
    calls[0][0][3] = 1.0  # ties
    calls[2][0][2, 5:90] = 9.0
    found = results(Calls(CALLS, "routes", {}, calls), tmp_path)
    for (logits, chosen, normal, _), (ids, weights, state, gradient) in zip(
        calls, found, strict=True
    ):
        logits = logits.clone().requires_grad_()
        wanted, hashed = route(logits, chosen, normalizes=normal), RouteHash()
        (wanted.weights * torch.arange(1.0, chosen + 1)).sum().backward()
        assert torch.equal(ids, wanted.ids)
        torch.testing.assert_close(weights, wanted.weights.detach())
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-4, atol=1e-6)
        hashed.add(ids)
        hashed.add(route(logits.flip(0), chosen, normalizes=normal).ids)
        assert hashed.state is not None
        assert torch.equal(state, hashed.state)


def test_given_experts_have_the_routers_weights_and_gradients(tmp_path: Path) -> None:
    """Those that the router chooses have the same bits as it gives them."""
    given = [(6, 2, True), (9, 3, False), (128, 8, True)]
    calls = []
    for experts, chosen, normal in given:
        logits = drawn(7, experts)
        others = torch.rand(7, experts).topk(chosen).indices.sort().values
        own = route(logits, chosen, normalizes=normal).ids
        calls += [(logits, others, normal), (logits, own, normal)]
    found = results(Calls(CALLS, "replayed", {}, calls), tmp_path)
    for number, ((logits, ids, normal), (weights, gradient, own, own_gradient)) in enumerate(
        zip(calls, found, strict=True)
    ):
        logits = logits.clone().requires_grad_()
        wanted = route(logits, ids.shape[1], normalizes=normal, ids=ids).weights
        (wanted * torch.arange(1.0, ids.shape[1] + 1)).sum().backward()
        torch.testing.assert_close(weights, wanted.detach())
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-4, atol=1e-6)
        is_own = number % 2 == 1
        assert torch.equal(weights, own) == torch.equal(gradient, own_gradient) == is_own


def test_unused_rows_have_no_expert(tmp_path: Path) -> None:
    used = torch.tensor([4, -1, 0, -1])
    call = drawn(4, 6), 2, True, used
    ((ids, weights),) = results(Calls(CALLS, "routes", {}, [call]), tmp_path)
    wanted = route(call[0], 2, normalizes=True)
    assert torch.equal(ids[used >= 0], wanted.ids[used >= 0])
    assert (ids[used < 0] == 6).all()
    assert not weights[used < 0].any()


def test_not_a_number_gives_ids_within_bounds(tmp_path: Path) -> None:
    logits = drawn(3, 6)
    logits[1, 2], logits[2] = float("nan"), float("-inf")
    used = torch.zeros(3, dtype=torch.int64)
    ((ids, _),) = results(Calls(CALLS, "routes", {}, [(logits, 2, True, used)]), tmp_path)
    assert ((ids >= 0) & (ids < 6)).all()
    assert (ids.diff(dim=1) > 0).all()


def test_experts_that_ranks_share_have_the_bits_of_all_at_once(tmp_path: Path) -> None:
    calls = []
    for sizes, tokens in (((20, 5, 2, 12), 17), ((32, 8, 2, 16), 3)):
        state = {
            name: one.detach().clone() for name, one in mixture(sizes, True).named_parameters()
        }
        rows = drawn(tokens, sizes[0]), drawn(tokens, sizes[0], seed=1)
        calls += [(sizes, state, *rows, adapted) for adapted in (False, True)]
    every = results(Calls(CALLS, "shared_experts", {}, calls), tmp_path)
    for (*_, adapted), (whole, split) in zip(calls, every, strict=True):
        assert whole.keys() == split.keys()
        for name, value in whole.items():
            if adapted and name not in ("out", "alone", "none"):  # gradients have other sums
                torch.testing.assert_close(split[name], value, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(split[name], value), name
