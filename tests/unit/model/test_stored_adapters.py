"""PEFT folders that are read, and the sentences with which others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.errors import ConfigError
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.peft_folder import read_adapters
from spmd_rl.model.stored_adapters import stored_adapters
from tests.specs import with_layers
from tests.unit.model.test_lora import SPEC

# adapter_config.json as peft 0.17 writes it
CONFIG: dict[str, object] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "Qwen/Qwen2-0.5B",
    "bias": "none", "corda_config": None, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 7, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "qalora_group_size": 16, "r": 3, "rank_pattern": {}, "revision": None,
    "target_modules": ["v_proj", "q_proj"], "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
LORA = LoraConfig(3, 7.0, ("q_proj", "v_proj"))
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def write(
    folder: Path, dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA, **changed: object
) -> LoraConfig:
    """Write a folder of random adapters, and return the settings that read it."""
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changed))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"base_model.model.{name}": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in lora.shapes(SPEC).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return replace(LORA, folder=str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_read_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    found = dict(read_adapters(write(tmp_path, dtype), SPEC))
    assert {name: tuple(one.shape) for name, one in found.items()} == LORA.shapes(SPEC)
    generator = torch.Generator().manual_seed(0)
    for name, shape in LORA.shapes(SPEC).items():
        assert torch.equal(found[name], torch.randn(shape, generator=generator).to(dtype))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"peft_type": "LOHA"}, 'peft_type is "LOHA": expected "LORA"'),
        ({"bias": "all"}, 'bias is "all": expected "none"'),
        ({"use_dora": True}, "use_dora is true: expected nothing"),
        ({"use_rslora": True}, "use_rslora is true: expected nothing"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"]: expected nothing'),
        ({"rank_pattern": {"q_proj": 4}}, 'rank_pattern is {"q_proj": 4}: expected nothing'),
        ({"something_new": 1}, "something_new is 1: expected nothing"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa": expected'),
        ({"r": None}, "r is null: expected a whole number"),
        ({"r": 4}, "set trainer.lora.rank = 4, trainer.lora.alpha = 7 and"),
        ({"lora_alpha": 16}, "trainer.lora.alpha = 16 and trainer.lora.targets = ["),
    ],
)
def test_what_is_not_computed_here_is_refused(
    tmp_path: Path, changed: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        stored_adapters(write(tmp_path, **changed), SPEC)
    assert sentence in str(refused.value)


def test_other_targets_are_named(tmp_path: Path) -> None:
    lora = write(tmp_path, lora=replace(LORA, targets=("up_proj", "k_proj")))
    with pytest.raises(ConfigError, match=r'trainer.lora.targets = \["k_proj", "up_proj"\]$'):
        stored_adapters(lora, SPEC)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            with_layers(replace(SPEC, hidden_size=32), hidden_size=32),
            rf"{FIRST} is \[3, 24\], and the model needs \[3, 32\]",
        ),
        (
            replace(SPEC, blocks=SPEC.blocks[:1] * 3),
            "it lacks 4 adapters, first model.layers.2.self_attn",
        ),
        (
            replace(SPEC, blocks=SPEC.blocks[:1]),
            "layers.1.self_attn.q_proj.lora_A.weight belongs to no",
        ),
    ],
)
def test_another_base_is_refused(tmp_path: Path, spec: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"have another base than `model`.*{sentence}"):
        stored_adapters(write(tmp_path), spec)  # type: ignore[arg-type]


def test_what_is_no_folder_of_adapters_is_refused(tmp_path: Path) -> None:
    lora = replace(LORA, folder=str(tmp_path))
    with pytest.raises(ConfigError, match="but there is no adapter_config.json in it"):
        stored_adapters(lora, SPEC)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match="is not a readable safetensors file"):
        stored_adapters(lora, SPEC)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no adapter_model.safetensors"):
        stored_adapters(lora, SPEC)
    with pytest.raises(ConfigError, match="^folder = 'x': expected '' without a rank"):
        LoraConfig(folder="x")
