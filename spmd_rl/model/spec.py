"""Specification of a model, read from the config.json of a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spmd_rl.errors import ConfigError
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.rope_spec import RopeSpec, rope_spec

FAMILIES = {"llama": "Llama-3", "qwen2": "Qwen2.5", "qwen3": "Qwen3"}
MOE_FAMILY = "qwen3_moe"  # which Megatron-core alone trains (moe_spec.py)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of any mixture
# fields on which no bit of a forward pass depends, once the rotary table is given
NOT_ARITHMETIC = {"family", "rope", "eos_ids", "init_std"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTER = "adapter_config.json"  # in a folder that peft wrote, or that is for it
VALUE_HEAD = "score.weight"  # the name that transformers gives it
Head = Literal["lm", "value"]  # what a model computes of its hidden states: logits, or a number
VALUE_ARCHITECTURE = "ForSequenceClassification"  # how the name of such an architecture ends
FULL = "full_attention"
UNSUPPORTED_KEYS = {  # with these, transformers computes something else or with other weights
    "attention_chunk_size": "chunked attention is not supported",
    "num_kv_shared_layers": "layers that share their keys and values are not supported",
    "per_layer_config": "layers that differ from each other are not supported",
    "quantization_config": "quantized models are not supported",
    "transformers_weights": "weights are read from model.safetensors, "
    "or as model.safetensors.index.json names them",
}


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
        """Read the specification of a model folder.

        Raises: ConfigError if the folder, its config.json or a field is missing, broken or of
        another family.
        """
        path = model_folder(folder) / "config.json"
        if not path.is_file() and (path.parent / ADAPTER).is_file():
            raise ConfigError(
                f"{folder} holds adapters alone: name their base here, and them as "
                "trainer.lora.folder, or merge the two first (docs/lora.md)"
            )
        if not path.is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        config = Fields(str(path), read_object(path))
        family = config.value("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(
                f"{path}: model_type {family!r} is not one of {', '.join(FAMILIES)}"
                f"{_way_of_mixtures(config.raw)}"
            )
        return spec_of(folder, config, family)

    @property
    def arithmetic(self) -> str:
        """All that a forward pass depends on beside weights and rotary table, as text.

        For example `vocab_size=104, hidden_size=64, ...`.
        """
        return ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if name not in NOT_ARITHMETIC
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with a tied head counted once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self, head: Head = "lm") -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, in the network's order; needs no torch."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {
                f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()
            }
        shapes["model.norm.weight"] = (self.hidden_size,)
        if head == "value":
            shapes[VALUE_HEAD] = (1, self.hidden_size)
        elif not self.tie_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's parameters, by the name within the layer."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in self._block_linears():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {
                f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")
            }
        return shapes | {
            f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }

    def _block_linears(self) -> list[tuple[str, int, int, bool]]:
        """Return name, rows and columns of a layer's linears, and whether each has a bias."""
        hidden, inner = self.hidden_size, self.intermediate_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            ("self_attn.q_proj", width, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, width, self.out_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ]


def spec_of(folder: str | Path, config: Fields, family: str) -> ModelSpec:
    """Return the specification in the fields of a folder's config.json, read as this family's.

    Raises: ConfigError for a field that is missing, broken, or means another network.
    """
    _refuse_unread(config, family)
    return _from_config(config, family, _eos_ids(Path(folder), config))


def _way_of_mixtures(config: Mapping[str, object]) -> str:
    """Return the end of a sentence about a mixture of experts; "" for a dense model."""
    if config.get("model_type") == MOE_FAMILY:
        return (
            ": `spmd-rl run sft` trains it with --trainer.backend.kind=megatron and "
            "--split.train.ep=N; no engine generates with a mixture of experts here, so a recipe "
            "that generates, such as grpo, cannot take it"
        )
    if any(key in config for key in EXPERT_COUNTS):
        return f": of mixtures of experts, {MOE_FAMILY} alone is trained, by `spmd-rl run sft`"
    return ""


def head_of(folder: str | Path) -> Head:
    """Return which head the model in a folder has: that of a language model, or a value head.

    Raises: ConfigError if there is no such folder, or no config.json.
    """
    path = model_folder(folder) / "config.json"
    names = read_object(path).get("architectures")
    has_value_head = isinstance(names, list) and any(
        isinstance(name, str) and name.endswith(VALUE_ARCHITECTURE) for name in names
    )
    return "value" if has_value_head else "lm"


def model_folder(folder: str | Path) -> Path:
    """Return the folder as a path. Raises: ConfigError if there is no such folder."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"no model folder at {folder}: "
            "models are read from disk (`hf download` brings one there)"
        )
    return Path(folder)


def _refuse_unread(config: Fields, family: str) -> None:
    """Raise ConfigError naming a key whose value means another network than ours."""
    for key, why in UNSUPPORTED_KEYS.items():
        if config.raw.get(key):
            raise ConfigError(f"{config.where}: {key} is set, and {why}")
    _refuse_sliding_window(config, family)
    if config.raw.get("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", '"silu", the only activation that is supported')
    if config.raw.get("is_causal", True) is not True:
        raise config.wrong("is_causal", "true, as each token sees only those before it")
    layers = config.raw.get("layer_types")
    if layers is not None and layers != [FULL] * config.count("num_hidden_layers"):
        raise config.wrong(
            "layer_types", f"{FULL!r} for each of the layers, the only type that is supported"
        )


def _refuse_sliding_window(config: Fields, family: str) -> None:
    if config.raw.get("use_sliding_window"):
        key = "use_sliding_window"
    elif family == "llama" and config.raw.get("sliding_window") is not None:
        key = "sliding_window"
    else:
        return
    raise ConfigError(
        f"{config.where}: {key} is set, and sliding-window attention is not supported"
    )


def _from_config(config: Fields, family: str, eos_ids: tuple[int, ...]) -> ModelSpec:
    """Read the specification; as in transformers, absent keys have defaults by family.

    Keys that transformers ignores in a family are ignored here too.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if family == "llama" and hidden % heads:
        raise ConfigError(
            f"{config.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    head_dim = _head_dim(config, family, hidden // heads)
    if head_dim % 2:
        raise ConfigError(
            f"{config.where}: head_dim {head_dim} is odd, and rotary positions turn pairs"
        )
    kv_heads = heads
    if config.raw.get("num_key_value_heads", 0) is not None:
        kv_heads = config.count("num_key_value_heads", heads if family == "llama" else 32)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    attention_bias = family != "qwen2" and config.flag("attention_bias", False)
    return ModelSpec(
        family=family,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config.count("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_spec(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=family == "llama" and config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        eos_ids=eos_ids,
        init_std=config.number("initializer_range", 0.02),
    )


def _head_dim(config: Fields, family: str, of_hidden: int) -> int:
    if family == "llama" and config.raw.get("head_dim") is None:
        return of_hidden
    return config.count("head_dim", 128 if family == "qwen3" else of_hidden)


def _eos_ids(folder: Path, config: Fields) -> tuple[int, ...]:
    """Return the ids that end a text. As in transformers, generation_config.json wins."""
    generation = folder / "generation_config.json"
    fields = Fields(str(generation), read_object(generation)) if generation.is_file() else config
    fields = fields if "eos_token_id" in fields.raw else config
    value = fields.raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise fields.wrong("eos_token_id", "a token's id, or a list of them")
    return tuple(ids)
