"""The shape of a model, read from the config.json of a Hugging Face folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError

FAMILIES = {"llama": "Llama-3", "qwen2": "Qwen2.5", "qwen3": "Qwen3"}
NO_ARITHMETIC = {"family", "rope", "eos_ids", "init_std"}  # no bit of a forward pass depends on these, given its table


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: base, and how the model stretches them (`kind` is Hugging Face's rope_type)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder-only transformer with grouped-query attention."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...] = ()
    init_std: float = 0.02

    @staticmethod
    def from_folder(folder: str | Path) -> ModelSpec:
        """Raises: ConfigError if the folder, its config.json or a field is missing, broken or of another family."""
        path = model_folder(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        raw = _read_object(path)
        try:
            return _from_config(raw, _eos_ids(Path(folder), raw))
        except KeyError as error:
            raise ConfigError(f"{path} has no field {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} has a field of the wrong kind: {error}") from None

    @property
    def arithmetic(self) -> str:
        """All that a forward pass depends on beside weights and rotary table: `vocab_size=104, hidden_size=64, ...`."""
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if name not in NO_ARITHMETIC)

    @property
    def num_parameters(self) -> int:
        """Parameters in all, a tied head counted once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the network by its canonical name, in the network's order; needs no torch."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._block_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _block_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            ("self_attn.q_proj", width, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, width, self.out_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in linears:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes | {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}


def model_folder(folder: str | Path) -> Path:
    """Raises: ConfigError if there is no such folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"no model folder at {folder}: models are read from disk (`hf download` brings one there)")
    return Path(folder)


def weight_files(folder: str | Path) -> list[Path]:
    """The folder's safetensors files. Raises: ConfigError if there are none, or one that the index names is missing."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{index} has no object weight_map")
        files = [index.with_name(str(name)) for name in sorted(set(names.values()))]
    else:
        files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no weights (no .safetensors file; a run with --trainer.init=random needs none)"
        )
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{index} names {path.name}, which is not there")
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return raw


def _size(raw: dict[str, Any], field: str) -> int:
    """A field that counts something. Raises: ConfigError when there is nothing to count."""
    if (size := int(raw[field])) < 1:
        raise ConfigError(f"{field} {size}: expected 1 or more")
    return size


def _from_config(raw: dict[str, Any], eos_ids: tuple[int, ...]) -> ModelSpec:
    family = raw["model_type"]
    if family not in FAMILIES:
        raise ConfigError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    if raw.get("use_sliding_window"):
        raise ConfigError("use_sliding_window is on, and sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    max_positions = _size(raw, "max_position_embeddings")
    return ModelSpec(
        family=family,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_positions=max_positions,
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_spec(raw, max_positions),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_ids=eos_ids,
        init_std=float(raw.get("initializer_range", 0.02)),
    )


def _rope_spec(raw: dict[str, Any], max_positions: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    fields = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(fields.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not one of default, linear, llama3, yarn")
    factor = float(fields["factor"])
    spec = RopeSpec(theta, kind, factor, int(fields.get("original_max_position_embeddings") or max_positions))
    if kind == "linear":
        return spec
    if kind == "llama3":
        return RopeSpec(
            theta,
            kind,
            factor,
            spec.original_positions,
            float(fields["low_freq_factor"]),
            float(fields["high_freq_factor"]),
        )
    attention = fields.get("attention_factor")
    return RopeSpec(
        theta,
        kind,
        factor,
        spec.original_positions,
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=float(attention)
        if attention is not None
        else (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in Hugging Face's generate."""
    value = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        value = _read_object(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
