"""gpt-oss: transformers' logits and gradients, and its folders, to the byte and in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention import blocked
from spmd_rl.model.hf import load_weights, model_weights, read_weights, save_folder
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from tests.unit.model.test_glm4_moe import both, logits

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
    "rope_theta": 150000.0,
}
BASE: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 13,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": YARN,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "all in windows": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 1},
    "no windows": {"layer_types": ["full_attention"] * 3, "attention_bias": False},
    "a long window": {"sliding_window": 70, "rope_parameters": {"rope_theta": 1e4}},
}
LENGTHS = (5, 1, 150, 33)
Pair = tuple[nn.Module, CausalLM]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return both(BASE | CONFIGS[request.param], tmp_path)


@pytest.fixture(params=["in one", "in slices"])
def sliced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may be cut, and what is before the window of all of a slice is left out."""
    if request.param == "in slices":
        monkeypatch.setattr(blocked, "MAX_SCORES", 1)


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def test_logits_are_those_of_transformers(pair: Pair, sliced: None) -> None:
    theirs, model = pair
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        actual = logits(model, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_gradients_are_those_of_transformers(pair: Pair, sliced: None, tmp_path: Path) -> None:
    theirs, model = pair
    pulls = [torch.randn(length, 97) for length in LENGTHS]
    found = [theirs(row[None]).logits[0] for row in tokens()]
    sum((one * pull).sum() for one, pull in zip(found, pulls, strict=True)).backward()
    (logits(model, tokens()) * torch.cat(pulls)).sum().backward()
    for one in theirs.parameters():
        one.data = one.grad
    theirs.save_pretrained(tmp_path)
    expected = dict(model_weights(tmp_path, model.spec.parameter_shapes()))
    for name, one in model.named_parameters():
        assert (one.grad - expected[name]).norm() <= 2e-5 * expected[name].norm(), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": None}, "rope_scaling is missing"),
        ({"swiglu_limit": 5.0}, "swiglu_limit"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ],
)
def test_other_networks_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | change))
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


def test_a_folder_comes_back_to_the_byte(tmp_path: Path) -> None:
    both(BASE, tmp_path / "in", torch.bfloat16)
    model = CausalLM(read_spec(tmp_path / "in")).to(torch.bfloat16)
    load_weights(model, tmp_path / "in")
    save_folder(tmp_path / "out", tmp_path / "in", model.named_parameters(), torch.bfloat16)
    files = [tmp_path / name / "model.safetensors" for name in ("in", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def in_mxfp4(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Write a folder like one that OpenAI published; returns its codes and scales by name."""
    both(BASE, folder, torch.bfloat16)
    config, file = folder / "config.json", folder / "model.safetensors"
    raw = json.loads(config.read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    stored, coded = load_file(file), {}
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        count, columns, rows = stored.pop(name).shape
        codes = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator)
        scales = torch.randint(110, 128, (count, rows, columns // 32), generator=generator)
        coded[name] = codes.to(torch.uint8), scales.to(torch.uint8)
        stored |= {f"{name}_blocks": coded[name][0], f"{name}_scales": coded[name][1]}
    save_file(stored, file, metadata={"format": "pt"})
    return coded


def test_a_folder_in_mxfp4_has_the_weights_that_transformers_reads(tmp_path: Path) -> None:
    coded = in_mxfp4(tmp_path / "in")
    shapes = read_spec(tmp_path / "in").parameter_shapes()
    weights = model_weights(tmp_path / "in", shapes)
    save_folder(tmp_path / "out", tmp_path / "in", weights, torch.bfloat16)
    written = dict(read_weights(tmp_path / "out"))
    for name, (codes, scales) in coded.items():
        expected = convert_moe_packed_tensors(codes, scales)
        assert torch.equal(written[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("lost", "16 bytes of codes"),
        ("cut", "16 bytes of codes"),
        ("alone", "quantized weights"),
        ("not a number", "not finite"),
    ],
)
def test_a_broken_folder_in_mxfp4_is_refused(broken: str, said: str, tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    if broken == "lost":
        del stored[f"{name}_scales"]
    elif broken == "cut":
        stored[f"{name}_scales"] = stored[f"{name}_scales"][:, 1:].contiguous()
    elif broken == "not a number":
        stored[f"{name}_scales"][2, 5, 0] = 255
        stored[f"{name}_blocks"][2, 5, 0] = 0x33
    else:
        del stored[f"{name}_blocks"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        dict(model_weights(tmp_path, read_spec(tmp_path).parameter_shapes()))


def test_mxfp4_of_another_family_is_refused(tmp_path: Path) -> None:
    """Its stacked tensors would say nothing of how gates and units lie."""
    in_mxfp4(tmp_path / "coded")
    both(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 97,
            "hidden_size": 96,
            "intermediate_size": 64,
            "moe_intermediate_size": 64,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
        },
        tmp_path / "plain",
    )
    file = tmp_path / "plain" / "model.safetensors"
    codes = load_file(tmp_path / "coded" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    coded = {key: codes[key] for key in (f"{name}_blocks", f"{name}_scales")}
    save_file(load_file(file) | coded, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="as MXFP4: quantized weights are not read"):
        dict(model_weights(tmp_path / "plain", read_spec(tmp_path / "plain").parameter_shapes()))


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    """PEFT has none for experts that are stacked, so a folder could not say them."""
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    spec = read_spec(tmp_path)
    assert LoraConfig(rank=2).of_model(spec).projections == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ConfigError, match="no projection named up_proj"):
        LoraConfig(rank=2, targets=("up_proj",)).of_model(spec)


@pytest.mark.parametrize("what", ["window", "sinks", "limit"])
def test_another_network_is_seen(what: str, tmp_path: Path) -> None:
    """A negative control."""
    theirs, model = both(BASE, tmp_path)
    layer = model.model.layers[0]
    if what == "window":
        layer.self_attn.window += 1
    elif what == "sinks":
        layer.self_attn.sinks.data += 0.1
    else:
        for expert in layer.mlp.experts:
            expert.limit = 0.5
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        assert (logits(model, tokens()) - expected).abs().max() > 1e-3 * expected.abs().max()
