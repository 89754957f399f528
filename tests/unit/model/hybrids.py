"""Tiny models of the families with gated delta layers, as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from spmd_rl.model.hf import load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "full_attention_interval": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e5,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"model_type": "qwen3_next", **TEXT, **EXPERTS},
    "qwen3_next dense": {"model_type": "qwen3_next", **TEXT, **EXPERTS, "num_experts": 0},
    "qwen3_next mixed": {
        "model_type": "qwen3_next",
        **TEXT,
        **EXPERTS,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **TEXT, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **TEXT, **EXPERTS},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **TEXT, "rope_parameters": MROPE}
        | {"tie_word_embeddings": True},
        "vision_config": VISION,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {"model_type": "qwen3_5_moe_text", **TEXT, **EXPERTS},
        "vision_config": VISION,
    },
}


def reference(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' model of a config, also written to `folder`."""
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    sees = "vision_config" in CONFIGS[name]
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    torch.manual_seed(3)
    model = kind.from_config(config).eval()
    for one in model.parameters():
        one.data.normal_(std=0.15)
    model.to(dtype).save_pretrained(folder)
    return model


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Our model of a folder."""
    model = CausalLM(read_spec(folder)).to(dtype)
    load_weights(model, folder)
    return model
