"""Model folders with settings drawn at random, and weight files of the same network."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.unit.model.drawn import Draw, write
from tests.unit.model.drawn_weights import draw_weights

VOCAB = 300
POSITIONS = 64


def draw_folder(seed: int, folder: Path) -> Draw:
    """Write the folder of a seed."""
    draw = Draw(seed, random.Random(f"model folder {seed}"))
    draw.config = _network(draw)
    _rope(draw)
    plain = dict(draw.config)
    if draw.chance(0.1):
        _odd_key(draw)
    folder.mkdir(parents=True)
    write(folder / "config.json", draw.config)
    draw_weights(draw, plain, folder)
    return draw


def _network(draw: Draw) -> dict[str, Any]:
    pick = draw.random.choice
    family, heads = pick(["llama", "qwen2", "qwen3"]), 4
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": pick([1, 2, 4, None]),
        "max_position_embeddings": POSITIONS,
        "eos_token_id": pick([1, [1, 2]]),
        "bos_token_id": 0,
    }
    if family == "qwen3" or draw.chance(0.3):
        config["head_dim"] = pick([8, 16, 6, *([None] if family == "llama" else [])])
    optional: dict[str, list[Any]] = {
        "tie_word_embeddings": [True, False],
        "rms_norm_eps": [1e-5, 1e-3],
        "attention_bias": [True, False],
        "mlp_bias": [True, False],
        "hidden_act": ["silu"],
        "attention_dropout": [0.0],
        "use_sliding_window": [False],
        "layer_types": [["full_attention"] * 2, None],
        "pretraining_tp": [1, 2],
        "use_cache": [True, False],
        "final_logit_softcapping": [30.0],
        "logits_scaling": [8.0],
        "sliding_window": [None if family == "llama" else 4],
        "max_window_layers": [1],
        "torch_dtype": ["bfloat16", "float32"],
    }
    return config | {key: pick(values) for key, values in optional.items() if draw.chance(0.5)}


def _rope(draw: Draw) -> None:
    """Draw rotary positions in either spelling, or in both."""
    pick, config = draw.random.choice, draw.config
    kinds = {"absent": 2, "default": 2, "linear": 2, "llama3": 4, "yarn": 8, "dynamic": 1}
    kind = draw.random.choices(list(kinds), list(kinds.values()))[0]
    if draw.chance(0.7):
        config["rope_theta"] = pick([500.0, 10000.0, 1e6])
    if kind == "absent":
        return
    rope: dict[str, Any] = {pick(["rope_type", "type"]): kind}
    if draw.chance(0.5):
        rope["rope_theta"] = pick([700.0, 20000.0])
    if kind == "dynamic":
        draw.suspect("rope_type")
    if kind != "default":
        rope["factor"] = pick([2.0, 4, 8.0])
    if kind in ("llama3", "yarn"):
        for place in (rope, config):
            if draw.chance(0.6):
                place["original_max_position_embeddings"] = pick([16, 32])
    if kind == "llama3":
        rope |= {"low_freq_factor": pick([1.0, 2]), "high_freq_factor": pick([4.0, 8.0])}
    if kind == "yarn":
        _yarn(draw, rope)
    _odd_rope_key(draw, rope)
    _spell(draw, rope)


def _yarn(draw: Draw, rope: dict[str, Any]) -> None:
    optional: dict[str, list[Any]] = {
        "truncate": [True, False],
        "mscale": [0.7, 1.0, None],
        "mscale_all_dim": [0.5, 1.0, None],
        "attention_factor": [1.3, None],
        "beta_fast": [32, 4.0, None],
        "beta_slow": [1, 0.5, 2.0],
    }
    rope.update(
        {key: draw.random.choice(values) for key, values in optional.items() if draw.chance(0.4)}
    )


def _odd_rope_key(draw: Draw, rope: dict[str, Any]) -> None:
    odd: list[tuple[str, Any]] = [
        ("attn_factor", 1.2),
        ("finetuned", True),
        ("partial_rotary_factor", 0.5),
        ("full_attention", {}),
        ("short_factor", [1.0] * 4),
        ("rope_theta", 0),
        ("rope_theta", None),
        ("factor", "4"),
        ("factor", -2.0),
        ("truncate", None),
    ]
    if draw.chance(0.08):
        key, value = draw.random.choice(odd)
        rope[key] = value
        draw.suspect(key)
    if draw.chance(0.1):
        rope["partial_rotary_factor"] = 1.0


def _spell(draw: Draw, rope: dict[str, Any]) -> None:
    """Draw the other spelling: the same, nothing, or something else."""
    spelling, other = draw.random.sample(["rope_scaling", "rope_parameters"], 2)
    draw.config[spelling] = rope
    if draw.chance(0.25):
        others = [
            None,
            {},
            {},
            dict(rope),
            dict(rope),
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 3.0},
        ]
        draw.config[other] = draw.random.choice(others)
        draw.suspect("rope_scaling")


def _odd_key(draw: Draw) -> None:
    """Draw a key of config.json that means another network, or that no network has."""
    odd: list[tuple[str, Any]] = [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("per_layer_config", {"1": {"intermediate_size": 16}}),
        ("is_causal", False),
        ("attention_chunk_size", 8),
        ("transformers_weights", "other.safetensors"),
        ("partial_rotary_factor", 0.5),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", None),
        ("rms_norm_eps", -1.0),
        ("rope_theta", None),
        ("head_dim", 7),
        ("head_dim", -8),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -1),
        ("eos_token_id", [1, "x"]),
        ("hidden_size", 32.0),
        ("vocab_size", VOCAB + 1),
        ("intermediate_size", 49),
        ("max_position_embeddings", None),
    ]
    key, value = draw.random.choice(odd)
    draw.config[key] = value
    draw.suspect(
        key,
        *{
            "vocab_size": ["embed_tokens", "lm_head"],
            "intermediate_size": ["mlp."],
            "head_dim": ["_proj"],
        }.get(key, []),
    )
    if key == "num_key_value_heads":
        draw.suspect("k_proj")
