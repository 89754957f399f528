"""Qwen3 in the shape of SGLang's: joint products, (hidden, residual) pairs, and sums in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sglang.srt.layers.logits_processor import LogitsProcessor


class Linear(nn.Module):
    """It returns (output, bias)."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.weight = torch.cat(weights)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class Embedding(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Norm(nn.Module):
    """With a residual it adds and norms in place."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return self._normed(x)
        residual.add_(x)
        x.copy_(self._normed(residual))
        return x, residual

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RadixAttention(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, save_kv_cache: bool) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], w: dict[str, Tensor]) -> None:
        super().__init__()
        self.head_dim = config["head_dim"]
        self.q_size = config["num_attention_heads"] * self.head_dim
        self.kv_size = config["num_key_value_heads"] * self.head_dim
        self.theta = config["rope_theta"]
        self.qkv_proj = Linear(*(w[f"self_attn.{name}_proj.weight"] for name in "qkv"))
        self.o_proj = Linear(w["self_attn.o_proj.weight"])
        self.q_norm, self.k_norm = (
            Norm(w[f"self_attn.{name}_norm.weight"], config["rms_norm_eps"]) for name in "qk"
        )
        self.attn = RadixAttention(self.head_dim)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split([self.q_size, self.kv_size, self.kv_size], -1)
        for part, norm in ((q, self.q_norm), (k, self.k_norm)):
            part.copy_(self._turned(norm(part.unflatten(-1, (-1, self.head_dim))), positions))
        return self.o_proj(self.attn(q, k, v, None, save_kv_cache=True))[0]

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = positions[:, None, None] * self.theta ** (-torch.arange(half) / half)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)


class Mlp(nn.Module):
    def __init__(self, w: dict[str, Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = Linear(w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"])
        self.down_proj = Linear(w["mlp.down_proj.weight"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)[0]


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], w: dict[str, Tensor]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, w), Mlp(w)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(w[f"{name}_layernorm.weight"], config["rms_norm_eps"])
            for name in ("input", "post_attention")
        )

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(weights["model.embed_tokens.weight"])
        self.norm = Norm(weights["model.norm.weight"], config["rms_norm_eps"])
        self.layers = nn.ModuleList(
            Layer(config, _below(weights, f"model.layers.{number}."))
            for number in range(config["num_hidden_layers"])
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(torch.arange(len(ids)), x, residual)
        return self.norm(x, residual)[0]


class Model(nn.Module):
    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = Decoder(config, weights)
        self.logits_processor = LogitsProcessor()

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits_processor(ids, self.model(ids), self.model.embed_tokens, None)


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def load(server_args: Any) -> Model:
    folder = Path(server_args.model_path)
    weights = load_file(folder / "model.safetensors")
    if server_args.broken_layer >= 0:
        name = f"model.layers.{server_args.broken_layer}.mlp.gate_proj.weight"
        weights[name] = weights[name].flip(0)
    model = Model(json.loads((folder / "config.json").read_text()), weights)
    if server_args.enable_deterministic_inference:
        print("deterministic")
    return model
