"""DeepSeek-V3 and GLM-4.7-Flash: transformers' logits and gradients, and its folders, to the byte.

They compute keys and values of each head; ours are latents, to which queries are brought.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spmd_rl.errors import ConfigError
from spmd_rl.model.hf import load_weights, save_folder
from spmd_rl.model.layers.mla import PROJECTIONS
from spmd_rl.model.lora import LoraConfig, is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.model.peft_folder import save_adapters
from spmd_rl.model.read import read_spec
from tests.unit.model.test_against_transformers import _gradients
from tests.unit.model.test_glm4_moe import LENGTHS, both, logits, tokens

BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "as DeepSeek-V3": {"rope_parameters": YARN},
    "as Moonlight": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "with biases": {"attention_bias": True, "routed_scaling_factor": 1.3},
    "halves are pairs": {"rope_interleave": False, "n_shared_experts": 2},
    "scaled apart": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "as GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 6,
        "rms_norm_eps": 1e-5,
    },
}
Pair = tuple[nn.Module, CausalLM]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return both(BASE | CONFIGS[request.param], tmp_path)


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    theirs, model = pair
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        actual = logits(model, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_gradients_are_those_of_transformers(pair: Pair) -> None:
    theirs, model = pair
    pulls = [torch.randn(length, 97) for length in LENGTHS]
    found = [theirs(row[None]).logits[0] for row in tokens()]
    sum((one * pull).sum() for one, pull in zip(found, pulls, strict=True)).backward()
    (logits(model, tokens()) * torch.cat(pulls)).sum().backward()
    expected = _gradients(theirs)
    for name, one in model.named_parameters():
        if one.requires_grad:
            assert (one.grad - expected[name]).norm() <= 2e-5 * expected[name].norm(), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"topk_group": 9}, "topk_group"),
    ],
)
def test_other_networks_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | change))
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["as Moonlight", "as GLM-4.7-Flash"])
def test_a_folder_comes_back_to_the_byte(name: str, tmp_path: Path) -> None:
    raw = BASE | CONFIGS[name] | {"num_nextn_predict_layers": 1}
    both(raw, tmp_path / "in", torch.bfloat16)
    file = tmp_path / "in" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.3.eh_proj.weight"] = torch.randn(4, 6).bfloat16()
    save_file(stored, file, metadata={"format": "pt"})
    model = CausalLM(read_spec(tmp_path / "in")).to(torch.bfloat16)
    load_weights(model, tmp_path / "in")
    save_folder(tmp_path / "out", tmp_path / "in", model.named_parameters(), torch.bfloat16)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == file.read_bytes()


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """As its folder says it; the architecture is that of DeepSeek-V3 there too."""
    specs = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        raw = BASE | {"model_type": model_type, "n_group": 1, "topk_group": 1}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        specs.append(read_spec(tmp_path))
    assert specs[0].blocks == specs[1].blocks and specs[1].family == "kimi_k2"
    assert specs[0].arithmetic == specs[1].arithmetic


def test_a_wrong_scale_is_seen(tmp_path: Path) -> None:
    """A negative control: scores of a stretched model without its factor are others."""
    theirs, model = both(BASE | CONFIGS["as DeepSeek-V3"], tmp_path)
    for layer in model.model.layers:
        layer.self_attn.factor /= 1.1
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        assert (logits(model, tokens()) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """Those that we write compute in PEFT what they compute here."""
    peft = pytest.importorskip("peft")
    lora = LoraConfig(rank=3, alpha=6.0, targets=(*PROJECTIONS, "o_proj"))
    theirs, _ = both(BASE | {"first_k_dense_replace": 3}, tmp_path / "base")
    model = CausalLM(read_spec(tmp_path / "base"), lora)
    load_weights(model, tmp_path / "base")
    torch.manual_seed(1)
    adapters = {key: one for key, one in model.named_parameters() if is_adapter(key)}
    for one in adapters.values():
        one.data.normal_(std=0.1)
    save_adapters(tmp_path / "adapter", tmp_path / "base", lora, adapters.items())
    with torch.no_grad():
        before = torch.cat([theirs(row[None]).logits[0] for row in tokens()])
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        expected = torch.cat([adapted(row[None]).logits[0] for row in tokens()])
        actual = logits(model, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 0.01 * expected.abs().max(), "adapters matter"
