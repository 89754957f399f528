"""An engine with adapters: the bits of the packed training forward, with fused projections too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spmd_rl.model.lora import LoraConfig, is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request, SamplingConfig

LORA = LoraConfig(rank=3, alpha=5.0)


def adapted(
    model: CausalLM, lora: LoraConfig = LORA, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Return the model with adapters of random weights, B too."""
    other = CausalLM(model.spec, lora).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    base = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        if is_adapter(name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        else:
            parameter.copy_(base[name])
    return other


def requests(num: int) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(max_tokens=24, ignore_eos=True)
    return [
        Request(uid, 0, rng.integers(0, 37, int(rng.integers(1, 70))).astype(np.int32), sampling)
        for uid in range(num)
    ]


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("targets", [("all-linear",), ("k_proj", "up_proj", "o_proj")])
def test_tokens_have_the_bits_of_the_training_forward(
    new_model: Callable[..., CausalLM],
    new_engine,
    finish,
    mismatched_tokens,
    family: str,
    dtype: torch.dtype,
    joined: bool,
    targets: tuple[str, ...],
) -> None:
    model = adapted(new_model(family), LoraConfig(rank=3, alpha=5.0, targets=targets), dtype)
    if joined:
        model.pack_projections()
        model.fuse_projections()
        assert model.model.layers[0].mlp.joined is not None
    asked = requests(6)
    name = str(dtype).removeprefix("torch.")
    engine = new_engine(model, max_step_tokens=64, page_size=16, dtype=name)
    drawn = finish(engine, asked)
    unfused = adapted(new_model(family), model.lora, dtype)
    assert mismatched_tokens(unfused, asked, drawn) == 0
    base = adapted(new_model(family), model.lora, dtype)
    for parameter_name, parameter in base.named_parameters():
        if ".lora_B." in parameter_name:
            parameter.zero_()
    assert mismatched_tokens(base, asked, drawn) > 100, "adapters matter"


def test_a_push_has_adapters_alone_and_the_contract_names_the_base(
    model: CausalLM, new_engine
) -> None:
    engine, other = new_engine(adapted(model)), new_engine(adapted(model))
    names = {piece.name for piece in engine.sink().layout(0).pieces}
    assert names == set(LORA.shapes(model.spec))
    assert "base_weights" not in new_engine(model).contract()
    facts = engine.contract()
    assert facts == other.contract()
    third = adapted(model)
    third.model.norm.weight[3] += 1e-6
    assert new_engine(third).contract()["base_weights"] != facts["base_weights"]
