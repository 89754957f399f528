"""Logits of random small models of every family equal transformers', through both loaders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import SHARD_BYTES, load_weights, random_weights, read_weights, save_folder
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.weight_files import has_weights

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CONFIGS = {
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied-yarn": transformers.Qwen3Config(
        **SMALL, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "qwen2.5": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2.5-linear": transformers.Qwen2Config(
        **SMALL, tie_word_embeddings=False, rope_parameters=LINEAR
    ),
    "llama3": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama3-biases": transformers.LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, moe_intermediate_size=24, num_experts=7, num_experts_per_tok=3
    ),
    "qwen3-moe-dense-layers": transformers.Qwen3MoeConfig(
        **SMALL | {"num_hidden_layers": 4},
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3-moe-normed": transformers.Qwen3MoeConfig(
        **SMALL,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
}


def _reference(name: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(hash(name) % 1000)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return model


def _ours(folder: Path) -> CausalLM:
    spec = read_spec(folder)
    model = CausalLM(spec)
    load_weights(model, folder)
    return model


def _logits(model: CausalLM, tokens: list[torch.Tensor]) -> torch.Tensor:
    lengths = np.array([len(row) for row in tokens], dtype=np.int32)
    attend = PackedAttention(
        lengths,
        device=torch.device("cpu"),
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model(torch.cat(tokens), positions, attend, torch.arange(int(lengths.sum())))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference, ours = _reference(name, tmp_path), _ours(tmp_path)
    tokens = [torch.randint(0, 97, (n,)) for n in (5, 1, 130, 64, 65)]
    with torch.no_grad():
        expected = torch.cat([reference(row[None]).logits[0] for row in tokens])
        actual = _logits(ours, tokens)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def _gradients(reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by the names of the folder, where each expert has matrices of its own."""
    found: dict[str, torch.Tensor] = {}
    for key, value in reference.named_parameters():
        assert value.grad is not None
        stem, _, last = key.rpartition(".experts.")
        for number, one in enumerate(value.grad if stem else ()):
            halves = one.chunk(2) if last == "gate_up_proj" else (one,)
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for name, half in zip(names, halves, strict=True):
                found[f"{stem}.experts.{number}.{name}.weight"] = half
        if not stem:
            found[key] = value.grad
    return found


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen2.5",
        "llama3-biases",
        "qwen3-moe",
        "qwen3-moe-dense-layers",
        "qwen3-moe-normed",
    ],
)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    reference, ours = _reference(name, tmp_path), _ours(tmp_path)
    tokens = [torch.randint(0, 97, (n,)) for n in (7, 70)]
    weights = [torch.randn(len(row), 97) for row in tokens]
    sum(
        (reference(row[None]).logits[0] * w).sum() for row, w in zip(tokens, weights, strict=True)
    ).backward()
    (_logits(ours, tokens) * torch.cat(weights)).sum().backward()
    expected = _gradients(reference)
    for key, value in ours.named_parameters():
        scale = expected[key].norm()
        assert (value.grad - expected[key]).norm() <= 2e-4 * scale, key


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count(name: str, tmp_path: Path) -> None:
    ours = (_reference(name, tmp_path), _ours(tmp_path))[1]
    assert ours.spec.num_parameters == sum(p.numel() for p in ours.parameters())
    assert ours.spec.parameter_shapes() == {
        key: tuple(p.shape) for key, p in ours.named_parameters()
    }


def test_saved_folder_loads_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, ours = _reference("qwen3", tmp_path / "a"), _ours(tmp_path / "a")
    monkeypatch.setattr("spmd_rl.model.hf.SHARD_BYTES", 20_000)
    assert SHARD_BYTES > 20_000
    save_folder(tmp_path / "b", tmp_path / "a", ours.named_parameters())
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    for (name, one), (_, other) in zip(
        reference.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert {name for name, _ in read_weights(tmp_path / "b")} == set(dict(ours.named_parameters()))
    save_folder(tmp_path / "b", tmp_path / "a", ours.named_parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_old_spelling_of_rope(tmp_path: Path) -> None:
    _reference("llama3", tmp_path)
    new = read_spec(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_spec(tmp_path) == new


def _break(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def test_bad_folders_end_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        read_spec(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_spec(tmp_path)
    folder = tmp_path / "m"
    _reference("qwen3", folder)
    good = (folder / "config.json").read_text()
    for changes, sentence in [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": "wide"}, "hidden_size is .wide.: expected a whole number"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads is 0: expected a whole number of 1 or more",
        ),
        ({"vocab_size": -1}, "vocab_size is -1: expected a whole number of 1 or more"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"hidden_size": 64}, "is \\["),
        ({"num_hidden_layers": 4, "layer_types": None}, "lacks"),
        ({"num_hidden_layers": 2, "layer_types": None}, "does not have"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"use_sliding_window": True}, "sliding"),
    ]:
        (folder / "config.json").write_text(good)
        _break(folder, **changes)
        with pytest.raises(ConfigError, match=sentence):
            _ours(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_spec(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json holds no JSON object"):
        read_spec(folder)
    (folder / "config.json").write_text(good)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        read_spec(folder)
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"garbage" * 10)
    with pytest.raises(ConfigError, match="safetensors"):
        _ours(folder)
    (folder / "model.safetensors").unlink()
    assert not has_weights(folder)
    with pytest.raises(ConfigError, match="no weights"):
        _ours(folder)


def test_random_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    _reference("qwen3", tmp_path)
    spec = read_spec(tmp_path)
    one, two, other = CausalLM(spec), CausalLM(spec), CausalLM(spec)
    for model, seed in (one, 3), (two, 3), (other, 4):
        model.load_state_dict(dict(random_weights(spec, seed)))
    pairs = zip(one.parameters(), two.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
