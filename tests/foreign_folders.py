"""Folders of small models of families that are not ours, written by `transformers`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = Path(__file__).parents[1] / "examples/arithmetic/model-20m"
SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = {"head_dim": 16, "sliding_window": 8}
GPT2 = {"vocab_size": 104, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
# what differs from the networks that we have: windows, caps, scales, biases, positions, experts
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": WINDOW | {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt2": GPT2 | {"bos_token_id": None, "eos_token_id": 1},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {"num_local_experts": 4},
}


def write_foreign_folder(folder: Path, family: str = "gemma3_text", **config: Any) -> str:
    """Write a folder with random weights and a tokenizer; return the name of the model."""
    sizes = {} if family == "gpt2" else SIZES
    given = sizes | CONFIGS.get(family, {}) | config
    made = AutoConfig.for_model(family, **given) if family != "gemma3" else _seeing_config()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        for parameter in network.parameters():  # norms and biases too, so that each has an effect
            parameter.data += 0.1 * torch.randn_like(parameter)
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return f"transformers:{folder}"


def _seeing_config() -> Any:
    """Return the config of a model with a tower for pictures that is larger than its decoder."""
    text = SIZES | CONFIGS["gemma3_text"]
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = tower | {"num_hidden_layers": 12, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    config.mm_tokens_per_image, config.eos_token_id = 4, 1
    config.image_token_id, config.boi_token_index, config.eoi_token_index = 103, 102, 101
    return config


def reference(model: str) -> Any:
    """Return `transformers`' own model of a folder."""
    folder = model.removeprefix("transformers:")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
