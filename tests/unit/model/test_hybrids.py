"""Qwen3-Next and Qwen3.5: transformers' logits and gradients, and its folders, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spmd_rl.errors import ConfigError
from spmd_rl.model.hf import load_weights, save_folder
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.lora import TARGETS, LoraConfig, is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.model.peft_folder import read_adapters, save_adapters
from spmd_rl.model.read import read_spec
from spmd_rl.model.weight_files import own_name
from tests.unit.model.hybrids import CONFIGS, ours, reference
from tests.unit.model.test_against_transformers import _gradients
from tests.unit.model.test_glm4_moe import LENGTHS, logits, tokens

KINDS = ("gate", "up", "down")
Pair = tuple[nn.Module, CausalLM]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return reference(request.param, tmp_path), ours(tmp_path)


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    theirs, model = pair
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        actual = logits(model, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_gradients_are_those_of_transformers(pair: Pair) -> None:
    theirs, model = pair
    for name, one in theirs.named_parameters():
        if "visual" in name:  # texts alone do not reach it
            one.grad = torch.zeros_like(one)
    pulls = [torch.randn(length, 97) for length in LENGTHS]
    found = [theirs(row[None]).logits[0] for row in tokens()]
    sum((one * pull).sum() for one, pull in zip(found, pulls, strict=True)).backward()
    (logits(model, tokens()) * torch.cat(pulls)).sum().backward()
    expected = {
        own_name(name, "model.language_model."): one for name, one in _gradients(theirs).items()
    }
    for name, one in model.named_parameters():
        assert (one.grad - expected[name]).norm() <= 2e-5 * expected[name].norm(), name


@pytest.mark.parametrize("change", ["norm", "gate", "shared_expert_gate"])
def test_a_wrong_part_is_seen(change: str, tmp_path: Path) -> None:
    """A negative control: each part of the new layers moves the logits."""
    theirs, model = reference("qwen3_5_moe_text", tmp_path), ours(tmp_path)
    for name, one in model.named_parameters():
        if change == "gate" and name.endswith("q_proj.weight"):
            one.data.unflatten(0, (-1, 2, 16))[:, 1] = 0
        elif change in name:
            one.data.add_(0.5)
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        assert (logits(model, tokens()) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_back_to_the_byte(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = reference(name, tmp_path / "in", dtype)
    file = tmp_path / "in" / "model.safetensors"
    stored = load_file(file) | {"mtp.fc.weight": torch.randn(4, 6).to(dtype)}
    save_file(stored, file, metadata={"format": "pt"})
    model = ours(tmp_path / "in", dtype)
    save_folder(tmp_path / "out", tmp_path / "in", model.named_parameters(), dtype)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == file.read_bytes()
    again = type(theirs).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(again[key], one) for key, one in theirs.state_dict().items())


def test_stacked_experts_stay_stacked(tmp_path: Path) -> None:
    reference("qwen3_5_moe", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    stored = load_file(file)
    for layer in (f"model.language_model.layers.{number}.mlp.experts" for number in range(4)):
        parts = [
            {kind: stored.pop(f"{layer}.{expert}.{kind}_proj.weight") for kind in KINDS}
            for expert in range(8)
        ]
        gate_up = [torch.cat([part["gate"], part["up"]]) for part in parts]
        stored[f"{layer}.gate_up_proj"] = torch.stack(gate_up)
        stored[f"{layer}.down_proj"] = torch.stack([part["down"] for part in parts])
    save_file(stored, file, metadata={"format": "pt"})
    model = ours(tmp_path / "in")
    save_folder(tmp_path / "out", tmp_path / "in", model.named_parameters())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == file.read_bytes()


def test_layers_are_as_the_config_says(tmp_path: Path) -> None:
    text = CONFIGS["qwen3_5"]["text_config"] | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_5"] | {"text_config": text}))
    spec = read_spec(tmp_path)
    assert [type(block.mixer) for block in spec.blocks] == [GatedDelta] * 3 + [Gqa]
    assert spec.rope.size == 8 and spec.rope.theta == 1e5 and spec.tie_embeddings


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "layer_types is"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, "for each of the layers"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads 2"),
        (
            "qwen3_5_text",
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval is 0",
        ),
        ("qwen3_5", {"text_config": 1}, "text_config is 1: expected an object"),
        ("qwen3_5", {"text_config": {}}, "text_config has no field"),
        ("qwen3_next", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
    ],
)
def test_other_networks_are_refused(
    name: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    with pytest.raises(ConfigError, match=sentence):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_adapters_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Those that we write compute in PEFT what they compute here, on all projections."""
    peft = pytest.importorskip("peft")
    # PEFT reads the MLPs of a mixture otherwise
    mlps = {"gate_proj", "up_proj", "down_proj"} if "experts" in str(CONFIGS[name]) else set()
    lora = LoraConfig(rank=3, alpha=6.0, targets=tuple(one for one in TARGETS if one not in mlps))
    base = reference(name, tmp_path / "base")
    model = CausalLM(read_spec(tmp_path / "base"), lora)
    load_weights(model, tmp_path / "base")
    torch.manual_seed(1)
    adapters = {key: one for key, one in model.named_parameters() if is_adapter(key)}
    for one in adapters.values():
        one.data.normal_(std=0.1)
    assert any("in_proj" in key for key in adapters), "layers with a state have some"
    assert any("linear_attn.out_proj" in key for key in adapters)
    save_adapters(tmp_path / "adapter", tmp_path / "base", lora, adapters.items())
    again = dict(read_adapters(replace(lora, folder=str(tmp_path / "adapter")), model.spec))
    assert again.keys() == adapters.keys()
    assert all(torch.equal(again[key], one) for key, one in adapters.items())
    with torch.no_grad():
        before = torch.cat([base(row[None]).logits[0] for row in tokens()])
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        actual = logits(model, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 0.1 * expected.abs().max(), "adapters matter"


def test_projections_that_a_model_lacks_are_refused(tmp_path: Path) -> None:
    reference("qwen3_5_text", tmp_path)
    spec = read_spec(tmp_path)
    assert "in_proj_qkvz" not in LoraConfig(rank=1).of_model(spec).targets
    with pytest.raises(ConfigError, match="no projection named in_proj_qkvz"):
        LoraConfig(rank=1, targets=("in_proj_qkvz",)).shapes(spec)
