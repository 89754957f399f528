"""The only reader of a model folder's config.json. A process parses the same file once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.errors import ConfigError
from spmd_rl.model.families import FAMILIES, Family
from spmd_rl.model.families.text_config import text_config
from spmd_rl.model.foreign.names import folder_of, is_foreign
from spmd_rl.model.formats.folders import check_quantization
from spmd_rl.model.json_fields import (
    MOST_LAYERS,
    MOST_POSITIONS,
    Fields,
    parse_object,
    read_object,
)
from spmd_rl.model.rope_spec import rope_spec
from spmd_rl.model.spec import Head, ModelSpec

ADAPTER = "adapter_config.json"  # in a folder that peft wrote, or that is for it
VALUE_ARCHITECTURE = "ForSequenceClassification"  # how the name of such an architecture ends
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of any mixture
FULL = "full_attention"
UNSUPPORTED_KEYS = {  # with these, transformers computes something else or with other weights
    "attention_chunk_size": "chunked attention is not supported",
    "num_kv_shared_layers": "layers that share their keys and values are not supported",
    "per_layer_config": "layers that differ from each other are not supported",
    "transformers_weights": "weights are read from model.safetensors, "
    "or as model.safetensors.index.json names them",
}
MOST_PARAMETERS = 10**14  # of a model that may be meant
NUM_KEPT = 16  # folders whose specification a process keeps


def read_spec(folder: str | Path) -> ModelSpec:
    """Read the specification of a model folder.

    Raises: ConfigError if the folder, its config.json or a field is missing, broken or of a family
    that is not known.
    """
    path = model_folder(folder) / "config.json"
    if not path.is_file() and (path.parent / ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds adapters alone: name their base here, and them as "
            "trainer.lora.folder, or merge the two first (docs/lora.md)"
        )
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    generation = path.with_name("generation_config.json")
    contents = path.read_bytes(), generation.read_bytes() if generation.is_file() else None
    if is_foreign(folder):
        return _parse_foreign(str(folder), path, *contents)
    return _parse(path, *contents)


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
    path = folder_of(folder)
    if not path.is_dir():
        raise ConfigError(
            f"no model folder at {path}: models are read from disk (`hf download` brings one "
            f"there){did_you_mean_path(path)}"
        )
    return path


@lru_cache(NUM_KEPT)
def _parse_foreign(model: str, path: Path, content: bytes, generation: bytes | None) -> ModelSpec:
    """Read the folder of a model that `transformers` computes; it is imported here."""
    from spmd_rl.model.foreign.spec import foreign_spec

    return foreign_spec(model, _eos_ids(*_fields(path, content, generation)))


def _fields(path: Path, content: bytes, generation: bytes | None) -> tuple[Fields, Fields | None]:
    config = Fields(str(path), parse_object(path, content))
    if generation is None:
        return config, None
    beside = path.with_name("generation_config.json")
    return config, Fields(str(beside), parse_object(beside, generation))


@lru_cache(NUM_KEPT)
def _parse(path: Path, content: bytes, generation: bytes | None) -> ModelSpec:
    """Read both files of a folder, from their contents."""
    config, of_generation = _fields(path, content, generation)
    model_type = config.value("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type {model_type!r} is not one of {', '.join(FAMILIES)}"
            f"{_of_mixtures(config.raw)}; --model=transformers:{path.parent} has it computed by "
            "transformers, without equal bits"
        )
    family = FAMILIES[model_type]
    if family.prefix:
        config = text_config(config)
    _refuse_unread(config, family)
    blocks, rotary_size = family.read(config)
    spec = ModelSpec(
        family=model_type,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        max_positions=config.count("max_position_embeddings", most=MOST_POSITIONS),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_spec(config, rotary_size),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        blocks=blocks,
        eos_ids=_eos_ids(config, of_generation),
        init_std=config.number("initializer_range", 0.02),
        unused=family.unused(config),
        folder_prefix=family.prefix,
    )
    if spec.num_parameters > MOST_PARAMETERS:
        raise ConfigError(f"{path} asks for a model of {spec.num_parameters:,} parameters")
    return spec


def _of_mixtures(config: Mapping[str, object]) -> str:
    """Return the end of a sentence about a mixture of experts; "" for a dense model."""
    if any(key in config for key in EXPERT_COUNTS):
        return ": of mixtures of experts, qwen3_moe and glm4_moe are"
    return ""


def _refuse_unread(config: Fields, family: Family) -> None:
    """Raise ConfigError naming a key whose value means another network than ours."""
    for key, why in UNSUPPORTED_KEYS.items():
        if config.raw.get(key):
            raise ConfigError(f"{config.where}: {key} is set, and {why}")
    check_quantization(config)
    if config.raw.get("use_sliding_window"):
        raise ConfigError(
            f"{config.where}: use_sliding_window is set, and sliding-window attention is not "
            "supported"
        )
    if config.raw.get("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", '"silu", the only activation that is supported')
    if config.raw.get("is_causal", True) is not True:
        raise config.wrong("is_causal", "true, as each token sees only those before it")
    layers = None if family.is_hybrid else config.raw.get("layer_types")
    if layers is not None and layers != [FULL] * config.count(
        "num_hidden_layers", most=MOST_LAYERS
    ):
        raise config.wrong(
            "layer_types", f"{FULL!r} for each of the layers, the only type that is supported"
        )


def _eos_ids(config: Fields, generation: Fields | None) -> tuple[int, ...]:
    """Return the ids that end a text. As in transformers, generation_config.json wins."""
    fields = generation if generation and "eos_token_id" in generation.raw else config
    value = fields.raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(
        isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MOST_POSITIONS
        for one in ids
    ):
        raise fields.wrong("eos_token_id", "a token's id, or a list of them")
    return tuple(ids)
