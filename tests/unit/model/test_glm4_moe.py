"""GLM-4.5's mixtures: transformers' logits and gradients, and its folders, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import load_weights, read_weights, save_folder
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.sigmoid_router import CORRECTION
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from tests.unit.model.test_against_transformers import _gradients

BASE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "plain": {},
    "as GLM-4.5-Air": {"attention_bias": True, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    "as GLM-4.5": {"attention_bias": True, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    "one group of two": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "two dense, two shared": {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "not normed": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "a quarter turns": {"partial_rotary_factor": 0.25},
    "all turns": {"rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 1.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
        }
    },
}
LENGTHS = (5, 1, 70, 33)


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, CausalLM]:
    return both(BASE | CONFIGS[request.param], tmp_path)


def both(raw: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model and ours, with the same weights through a folder."""
    config = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(3)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, one in [*reference.named_parameters(), *reference.named_buffers()]:
        if one.requires_grad or name.endswith(CORRECTION):
            one.data.normal_(std=0.15).add_(one.ndim == 1 and name.endswith("norm.weight"))
    reference.to(dtype)
    for name, one in reference.named_buffers():
        if name.endswith(CORRECTION):  # as published, and as transformers loads it
            one.data = one.data.float()
    reference.save_pretrained(folder)
    ours = CausalLM(read_spec(folder)).to(dtype)
    load_weights(ours, folder)
    return reference, ours


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def logits(model: CausalLM, rows: list[Tensor]) -> Tensor:
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    attend = PackedAttention(lengths, device=torch.device("cpu"))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model(torch.cat(rows), positions, attend, torch.arange(int(lengths.sum())))


def test_logits_are_those_of_transformers(pair: tuple[nn.Module, CausalLM]) -> None:
    reference, ours = pair
    with torch.no_grad():
        expected = torch.cat([reference(row[None]).logits[0] for row in tokens()])
        actual = logits(ours, tokens())
    assert (actual - expected).abs().max() <= 2e-5 * (1 + expected.abs().max())


def test_gradients_are_those_of_transformers(pair: tuple[nn.Module, CausalLM]) -> None:
    reference, ours = pair
    pulls = [torch.randn(length, 97) for length in LENGTHS]
    theirs = [reference(row[None]).logits[0] for row in tokens()]
    sum((one * pull).sum() for one, pull in zip(theirs, pulls, strict=True)).backward()
    (logits(ours, tokens()) * torch.cat(pulls)).sum().backward()
    expected = _gradients(reference)
    for name, one in ours.named_parameters():
        if name.endswith(CORRECTION):
            assert one.grad is None
        else:
            scale = expected[name].norm()
            assert (one.grad - expected[name]).norm() <= 2e-5 * scale, name


def test_a_wrong_router_is_seen(tmp_path: Path) -> None:
    """A negative control: without the correction, logits are others."""
    reference, ours = both(BASE | {"first_k_dense_replace": 0}, tmp_path)
    for name, one in ours.named_parameters():
        if name.endswith(CORRECTION):
            one.data.zero_()
    with torch.no_grad():
        expected = torch.cat([reference(row[None]).logits[0] for row in tokens()])
        assert (logits(ours, tokens()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("further", [0, 1])
def test_a_folder_comes_back_to_the_byte(further: int, dtype: torch.dtype, tmp_path: Path) -> None:
    raw = BASE | CONFIGS["as GLM-4.5"] | {"num_nextn_predict_layers": further}
    reference, _ = both(raw, tmp_path / "in", dtype)
    file = tmp_path / "in" / "model.safetensors"
    stored = load_file(file)
    if further:  # as it is published: a layer of its own, with an embedding and a head
        stored |= {
            f"model.layers.3.{name}": torch.randn(4, 6).to(dtype)
            for name in ("embed_tokens.weight", "eh_proj.weight", "shared_head.head.weight")
        }
        stored[f"model.layers.3.mlp.gate.{CORRECTION}"] = torch.randn(8)
        save_file(stored, file, metadata={"format": "pt"})
    ours = CausalLM(read_spec(tmp_path / "in")).to(dtype)
    load_weights(ours, tmp_path / "in")
    save_folder(tmp_path / "out", tmp_path / "in", ours.named_parameters(), dtype)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == file.read_bytes()
    assert stored[f"model.layers.1.mlp.gate.{CORRECTION}"].dtype == torch.float32
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    theirs = reference.state_dict()
    assert {name: one.dtype for name, one in again.state_dict().items()} == {
        name: one.dtype for name, one in theirs.items()
    }
    assert all(torch.equal(one, theirs[name]) for name, one in again.state_dict().items())
    assert len(dict(read_weights(tmp_path / "out"))) == len(stored)


def test_layers_are_as_the_config_says(tmp_path: Path) -> None:
    raw = BASE | CONFIGS["two dense, two shared"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    spec = read_spec(tmp_path)
    assert [type(block.mlp) for block in spec.blocks] == [Mlp, Mlp, Moe]
    assert spec.blocks[2].mlp.shared_size == 48
    assert spec.rope.size == 8
    assert spec.fixed_names() == {f"model.layers.2.mlp.gate.{CORRECTION}"}
    assert spec.unused == ("model.layers.3.",)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 3}, "n_group 3 equal groups"),
        ({"n_group": 8}, "of two experts or more"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 of n_group 2"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok 3 of topk_group 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1: expected a whole number"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is"),
        ({"partial_rotary_factor": 0.2}, "heads of 16 is 3"),
        ({"partial_rotary_factor": 1.5}, "expected a number of 1 or less"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_other_networks_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    with pytest.raises(ConfigError, match=sentence):
        read_spec(tmp_path)
