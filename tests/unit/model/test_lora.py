"""Adapters: forward passes against merged weights, gradients against plain torch, settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.fused_projections import join, lay_out
from spmd_rl.model.linear import Linear
from spmd_rl.model.lora import TARGETS, LoraConfig, is_adapter
from spmd_rl.model.network import CausalLM
from tests.specs import dense_spec

SPEC = dense_spec(
    "qwen2",
    vocab=37,
    hidden=24,
    inner=40,
    layers=2,
    heads=(3, 1, 8),
    positions=64,
    theta=1e6,
    tie_embeddings=True,
    qkv_bias=True,
    init_std=0.06,
)
LORA = LoraConfig(rank=3, alpha=7.0)
TOKENS = torch.randint(0, 37, (40,), generator=torch.Generator().manual_seed(0))


def drawn(model: CausalLM, seed: int = 0) -> CausalLM:
    """Return the model with random weights, of the adapters too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def base_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: one for name, one in model.state_dict().items() if not is_adapter(name)}


def logits(model: CausalLM) -> Tensor:
    attend = PackedAttention(np.array([30, 10], np.int32), device=TOKENS.device)
    positions = torch.cat([torch.arange(30), torch.arange(10)])
    return model(TOKENS, positions, attend, torch.arange(40))


@torch.no_grad()
def test_logits_are_those_of_merged_weights() -> None:
    adapted, merged = drawn(CausalLM(SPEC, LORA)), CausalLM(SPEC)
    merged.load_state_dict(base_of(adapted))
    assert not torch.allclose(logits(merged), logits(adapted), atol=1e-2), "adapters matter"
    state = adapted.state_dict()
    for name, weight in merged.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in state:
            a, b = (state[f"{layer}.{one}.weight"].double() for one in ("lora_A", "lora_B"))
            weight.copy_(weight.double() + 7 / 3 * (b @ a))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_zero_b_leaves_the_bases_output() -> None:
    """So that a policy and its reference agree bit for bit at the first step."""
    adapted, base = drawn(CausalLM(SPEC, LORA)), CausalLM(SPEC)
    base.load_state_dict(base_of(adapted))
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()
    assert torch.equal(logits(adapted), logits(base))


def test_gradients_are_those_of_plain_torch_in_float64() -> None:
    layer = Linear(24, 40, bias=True)
    layer.adapt(LORA.rank, LORA.scale)
    layer.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    a, b = layer.lora_A.weight.requires_grad_(), layer.lora_B.weight.requires_grad_()
    x = torch.randn(50, 24, generator=generator).requires_grad_()
    upstream = torch.randn(50, 40, generator=generator)
    (layer(x) * upstream).sum().backward()
    exact = [one.detach().double().requires_grad_() for one in (x, a, b)]
    wide_x, wide_a, wide_b = exact
    weight, bias = layer.weight.double(), layer.bias.double()
    out = wide_x @ weight.T + bias + 7 / 3 * (wide_x @ wide_a.T @ wide_b.T)
    (out * upstream.double()).sum().backward()
    for own, expected in zip((x, a, b), exact, strict=True):
        assert (own.grad - expected.grad).norm() <= 1e-6 * expected.grad.norm()
    assert layer.weight.grad is None


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("down_proj",)])
def test_shapes_are_those_of_the_network(targets: tuple[str, ...]) -> None:
    lora = LoraConfig(rank=5, targets=targets)
    named = {name: tuple(one.shape) for name, one in CausalLM(SPEC, lora).named_parameters()}
    adapters = {name: shape for name, shape in named.items() if is_adapter(name)}
    assert list(lora.shapes(SPEC).items()) == list(adapters.items())
    assert len(adapters) == 2 * SPEC.num_layers * len(lora.of_model(SPEC).projections)
    assert {name for name in named if not is_adapter(name)} == set(SPEC.parameter_shapes())


def test_the_contract_names_the_adapters() -> None:
    cpu = torch.device("cpu")
    facts = [
        CausalLM(SPEC, lora).contract(cpu, torch.float32)
        for lora in (LoraConfig(), LORA, LoraConfig(rank=3, alpha=8.0))
    ]
    assert "lora" not in facts[0]
    assert facts[1]["lora"] != facts[2]["lora"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": -1}, "rank"),
        ({"rank": 4, "alpha": 0.0}, "alpha"),
        ({"rank": 4, "targets": ("lm_head",)}, "targets"),
        ({"rank": 4, "targets": ()}, "targets"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} = "):
        LoraConfig(**settings)


def test_all_linear_is_every_projection() -> None:
    assert LoraConfig(rank=1).projections == TARGETS
    assert LoraConfig().projections == ()


def test_neighbours_by_chance_are_not_joined() -> None:
    """Allocations of their own may follow each other, and no tensor spans two of them."""
    memory = np.zeros(2 * 24 * 40, np.float32)
    projections = [Linear(24, 40, bias=False) for _ in range(2)]
    for one, half in zip(projections, np.split(memory, 2), strict=True):
        one.weight.data = torch.from_numpy(half).view(40, 24)
    ends = [one.weight.data_ptr() for one in projections]
    assert ends[1] - ends[0] == projections[0].weight.nbytes
    assert join(projections) is None
    lay_out(projections)
    assert join(projections) is not None


def test_adapters_are_joined_if_each_projection_has_one() -> None:
    projections = [Linear(24, width, bias=False) for width in (40, 16)]
    for number in range(3):
        lay_out(projections)
        joined = join(projections)
        assert joined is not None
        assert (joined.adapters is not None) == (number == 2)
        if number < 2:
            projections[number].adapt(LORA.rank, LORA.scale)
    assert joined.adapters.down.shape == (6, 24)
    assert joined.adapters.up.shape == (56, 3)
