"""Model folders of small mixtures, with weights, for whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE

MIXTURES = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}


def write_mixture(folder: Path, family: str, sizes: Mapping[str, int] | None = None) -> Path:
    """Write a folder with weights: corrections that are not zero, and a tensor that is not used.

    `sizes` are set in its config.
    """
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    mixture = {"model_type": family} | MIXTURES[family]
    (folder / "config.json").write_text(json.dumps(config | mixture | dict(sizes or {})))
    spec = read_spec(folder)
    weights = dict(random_weights(spec, 3))
    for number, name in enumerate(sorted(spec.fixed_names())):
        weights[name] = torch.linspace(-0.3, 0.3, len(weights[name])).roll(number)
    beside = {f"{name}eh_proj.weight": torch.ones(3, 5).bfloat16() for name in spec.unused}
    save_file(weights | beside, folder / "model.safetensors")
    return folder
