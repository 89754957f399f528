"""Model folders that are refused, with their error messages, and keys that are ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.errors import ConfigError
from spmd_rl.model.hf import model_weights, random_weights
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import EMBEDDING, HEAD, ModelSpec
from spmd_rl.model.weight_files import INDEX, SINGLE, has_weights, weight_files
from tests.specs import attention_of, mlp_of

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
}
GLM = {key: value for key, value in MIXTURE.items() if key != "num_experts"} | {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _spec(folder: Path, **changes: Any) -> ModelSpec:
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": ["llama"]}, "model_type .* is not one of llama, qwen2, qwen3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": -4}, "head_dim is -4: expected a whole number of 1 or more"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        (
            {"num_key_value_heads": "absent"},
            "num_attention_heads 2 is not a multiple of num_key_value_heads 32",
        ),
        ({"vocab_size": 10**13}, "vocab_size is 10000000000000: expected a whole number of at"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: expected a whole number of"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10+: expected a whole number of"),
        ({"intermediate_size": 10**30}, "intermediate_size is 10+: expected a whole number"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 10+: expected a whole number"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 10+: expected a whole"),
        ({"eos_token_id": 10**30}, "eos_token_id is 10+: expected a token's id"),
        (
            {"hidden_size": 1 << 24, "intermediate_size": 1 << 24, "num_hidden_layers": 4096},
            "asks for a model of [0-9,]* parameters",
        ),
        (MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: expected .* at most 8"),
        (MIXTURE | {"num_experts_per_tok": 10**30}, "num_experts_per_tok is 10+: expected"),
        (MIXTURE | {"num_experts": 10**7}, "num_experts is 10000000: expected a whole number of"),
        (GLM | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of topk_group 1 of n_group 1"),
        (GLM | {"n_routed_experts": 10**9}, "n_routed_experts is 10+: expected a whole number"),
        (GLM | {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 10+: expected"),
        (GLM | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1: .* of 0 or more"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0: expected a whole number"),
        ({"vocab_size": True}, "vocab_size is true: expected a whole number"),
        ({"vocab_size": "absent"}, "has no field 'vocab_size'"),
        (
            {"model_type": "llama", "hidden_size": 9},
            "hidden_size 9 is not a multiple of num_attention_heads 2",
        ),
        ({"rope_theta": 0}, "rope_theta is 0: expected a number greater than 1"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta is 1: expected"),
        ({"rope_theta": None}, "rope_theta is null: expected"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1: expected a number greater than 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity: expected"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*: expected"),
        (
            {"tie_word_embeddings": "false"},
            'tie_word_embeddings is "false": expected true or false',
        ),
        ({"attention_bias": None}, "attention_bias is null: expected true or false"),
        ({"eos_token_id": [1, "x"]}, r'eos_token_id is \[1, "x"\]: expected a token\'s id'),
        ({"eos_token_id": -1}, "eos_token_id is -1: expected a token's id"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"per_layer_config": {"1": {}}}, "per_layer_config is set"),
        ({"transformers_weights": "x.safetensors"}, "transformers_weights is set"),
        ({"attention_chunk_size": 8}, "attention_chunk_size is set"),
        ({"is_causal": False}, "is_causal is false"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types is .*: expected 'full_attention' for each",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"model_type": "llama", "sliding_window": 4}, "sliding_window is set"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: expected 1"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor is 0.5",
        ),
        ({"rope_parameters": "yarn"}, 'rope_parameters is "yarn": expected an object'),
        ({"rope_parameters": {"factor": 2}}, "factor is not supported with rope_type 'default'"),
        (
            {"rope_scaling": YARN | {"attn_factor": 1.0}},
            "attn_factor is not supported with rope_type 'yarn'",
        ),
        ({"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0: expected true or false"),
        ({"rope_scaling": YARN | {"beta_fast": "32"}}, 'beta_fast is "32"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no field 'factor'"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
            "high_freq_factor is 1: expected more than low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_type 'longrope' is not one of default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters disagree",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    _spec(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        _spec(tmp_path, **changes)


def test_keys_that_transformers_ignores_are_ignored(tmp_path: Path) -> None:
    """Qwen2 always has biases, whatever the keys say, and Qwen3 has none in its MLP."""
    qwen2 = _spec(tmp_path, model_type="qwen2", attention_bias=True, mlp_bias=True)
    assert attention_of(qwen2).qkv_bias and not attention_of(qwen2).out_bias
    assert not mlp_of(qwen2).bias and not mlp_of(_spec(tmp_path, mlp_bias=True)).bias
    assert _spec(tmp_path, final_logit_softcapping=30.0, pretraining_tp=2) == _spec(tmp_path)


def test_defaults_of_the_families(tmp_path: Path) -> None:
    def attention(**changes: Any) -> Gqa:
        return attention_of(_spec(tmp_path, **changes))

    assert attention(head_dim="absent").head_dim == 128
    assert attention(model_type="llama", head_dim=None).head_dim == 4
    assert attention(model_type="llama", num_key_value_heads="absent").num_kv_heads == 2
    assert attention(num_key_value_heads=None).num_kv_heads == 2


def test_the_original_context_may_stand_outside(tmp_path: Path) -> None:
    key = "original_max_position_embeddings"
    assert _spec(tmp_path, rope_scaling=LLAMA3).rope.original_positions == 64
    assert _spec(tmp_path, rope_scaling=YARN).rope.original_positions == 16
    assert _spec(tmp_path, rope_scaling=YARN, **{key: 32}).rope.original_positions == 32


def test_both_spellings_of_the_same(tmp_path: Path) -> None:
    """rope_theta may stand in either spelling, or beside them."""
    both = {
        "rope_scaling": YARN | {"rope_theta": 500.0},
        "rope_parameters": YARN,
        "rope_theta": 500.0,
    }
    assert (
        _spec(tmp_path, **both).rope == _spec(tmp_path, rope_parameters=YARN, rope_theta=500.0).rope
    )


def _save(folder: Path, **files: dict[str, torch.Tensor]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")


def _index(folder: Path, *files: str) -> None:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {str(i): file for i, file in enumerate(files)}})
    )


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    return dict(random_weights(_spec(tmp_path), 0))


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(model_weights(folder, read_spec(folder).parameter_shapes()))


def test_one_file_wins_over_an_index_and_strays(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    _save(tmp_path, model=tensors, old_model={name: one + 1 for name, one in tensors.items()})
    _index(tmp_path, "old_model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / SINGLE]
    assert all(torch.equal(one, tensors[name]) for name, one in _read(tmp_path).items())
    (tmp_path / SINGLE).unlink()
    assert weight_files(tmp_path) == [tmp_path / "old_model.safetensors"]
    (tmp_path / INDEX).unlink()
    assert not has_weights(tmp_path)
    with pytest.raises(
        ConfigError, match=re.escape(f"holds no weights (neither {SINGLE} nor {INDEX}")
    ):
        weight_files(tmp_path)


def test_shards_may_lie_in_folders_inside(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    (tmp_path / "s").mkdir()
    save_file(tensors, tmp_path / "s/a.safetensors")
    _index(tmp_path, "s/a.safetensors")
    assert has_weights(tmp_path) and _read(tmp_path).keys() == tensors.keys()
    for name in ("../a.safetensors", "s/../../a.safetensors", str(tmp_path / "s/a.safetensors")):
        _index(tmp_path, name)
        with pytest.raises(
            ConfigError, match=f"names {re.escape(name)}, which is outside the model folder"
        ):
            weight_files(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _save(tmp_path, a=tensors, b={EMBEDDING: tensors[EMBEDDING]})
    _index(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(
        ConfigError, match=rf"b\.safetensors and a\.safetensors both hold {EMBEDDING}"
    ):
        _read(tmp_path)


def test_a_tied_head_is_the_embedding(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    embedding = tensors[EMBEDDING]
    _save(tmp_path, model=tensors | {HEAD: embedding.clone()})
    assert HEAD not in _read(tmp_path)
    for other in (embedding + 1, embedding.double()):
        _save(tmp_path, model=tensors | {HEAD: other})
        with pytest.raises(
            ConfigError, match=f"tie_word_embeddings is true, and {HEAD} is not {EMBEDDING}"
        ):
            _read(tmp_path)
    _save(
        tmp_path, model={HEAD if name == EMBEDDING else name: one for name, one in tensors.items()}
    )
    assert torch.equal(_read(tmp_path)[EMBEDDING], embedding)


def test_odd_weights(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = "model.norm.weight"
    _save(tmp_path, model=tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(ConfigError, match=f"holds {name} as I8: quantized weights are not read"):
        _read(tmp_path)
    _save(tmp_path, model=tensors)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"holds adapter_config\.json, and adapters are not applied"
    ):
        _read(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert load_file(tmp_path / SINGLE).keys() == _read(tmp_path).keys()
