"""The linear layer of the local layer spec: products of their own, whatever holds their rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.kernels.linear import cpu
from spmd_rl.train.megatron.linear import LocalActivation, LocalLinear, LocalProjections
from spmd_rl.train.megatron.tensor_ranks import TensorRanks
from tests.libraries import other_sums_of_few_columns

WIDTH, TOKENS = 32, 21
WIDTHS = (12, 4, 4)


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> LocalLinear:
    """q, k and v of six query heads and two of keys and values, which are narrow."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = SimpleNamespace(params_dtype=torch.float32)
    alone = SimpleNamespace(size=lambda: 1)
    ranks = TensorRanks(alone, row_shards=1, splits_tokens=False)  # type: ignore[arg-type]
    made = LocalProjections(
        WIDTH, sum(WIDTHS), config=config, bias=True, ranks=ranks, widths=WIDTHS
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return made


def inputs(num_tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, 1, WIDTH, generator=generator)


def test_each_projection_has_the_bits_of_its_own_product(
    layer: LocalLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sums of a library's product depend on its number of columns."""
    monkeypatch.setattr(cpu.F, "linear", other_sums_of_few_columns)
    out, bias = layer(inputs())
    assert bias is None and layer.bias is not None
    q, k, v = layer.split(out[:, 0])
    for found, rows in zip((q, k, v), torch.arange(sum(WIDTHS)).split(WIDTHS), strict=True):
        expected = linear(inputs()[:, 0], layer.weight[rows], layer.bias[rows])
        assert torch.equal(found, expected)
    assert torch.equal(layer.join([q, k, v]), out[:, 0])
    # the control: one product of all columns
    fused = linear(inputs()[:, 0], layer.weight, layer.bias)
    assert torch.allclose(fused, out[:, 0], atol=1e-5) and not torch.equal(fused, out[:, 0])


def test_gradients_are_those_of_one_product(layer: LocalLinear) -> None:
    x = inputs().requires_grad_()
    upstream = torch.randn(TOKENS, len(layer.weight), generator=torch.Generator().manual_seed(2))
    (layer(x)[0][:, 0] * upstream).sum().backward()
    assert layer.bias is not None and x.grad is not None
    wide = upstream.double()
    expected = {
        "x": (x.grad[:, 0], wide @ layer.weight.double()),
        "weight": (layer.weight.grad, wide.t() @ x[:, 0].double()),
        "bias": (layer.bias.grad, wide.sum(0)),
    }
    for name, (found, right) in expected.items():
        assert found is not None
        assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5), name


def test_the_activation_is_silu_of_the_gate(layer: LocalLinear) -> None:
    gate_up = inputs().double()
    gate, up = gate_up[:, 0].chunk(2, -1)
    found = LocalActivation(None)(inputs())
    assert found.shape == (TOKENS, 1, WIDTH // 2)
    assert torch.allclose(found[:, 0].double(), gate * gate.sigmoid() * up, atol=1e-6)
