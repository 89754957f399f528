"""Rotary positions as a config.json describes them, read in transformers' order of precedence.

A key that is not read here is refused by name, because it could mean other frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmd_rl.errors import ConfigError
from spmd_rl.model.json_fields import MOST_POSITIONS, Fields

KEYS_BY_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
PART = "partial_rotary_factor"
# the last two say which positions of images turn what; those of texts are all alike
COMMON_KEYS = {"rope_type", "type", "rope_theta", PART, "mrope_section", "mrope_interleaved"}
SPELLINGS = ("rope_scaling", "rope_parameters")  # before transformers 5, and since


@dataclass(frozen=True)
class RopeSpec:
    """Base of the frequencies, and how the model stretches them; `kind` is the rope_type.

    Of each head, `size` elements are rotated, in pairs.
    """

    size: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def rope_spec(config: Fields, size: int) -> RopeSpec:
    """Read the rotary positions of a config, where `size` elements of each head are rotated.

    Raises: ConfigError naming a key that is not supported, wrong, or contradicted by the other
    spelling.
    """
    read = {key: _read(config, key, size) for key in SPELLINGS if config.raw.get(key)}
    if len(set(read.values())) > 1:
        raise ConfigError(
            f"{config.where}: rope_scaling and rope_parameters disagree: keep one of them "
            "(rope_theta may stand in either, or beside them)"
        )
    return next(iter(read.values())) if read else _read(config, SPELLINGS[-1], size)


def rotated_size(config: Fields, whole: int, default: float) -> int:
    """Return how many of the `whole` elements of a head are rotated, where some may not be.

    `default` is the family's share of them. A share within the rotary positions wins over one
    beside them. Raises: ConfigError for a share that leaves no pairs.
    """
    share = default
    for fields in (config, *_spelt(config)):
        if fields.raw.get(PART) is not None:
            share = fields.number(PART)
            if share > 1:
                raise fields.wrong(PART, "a number of 1 or less")
    size = int(whole * share)
    if size % 2 or size == 0:
        raise ConfigError(
            f"{config.where}: {PART} {share:g} of heads of {whole} is {size}, and rotary "
            "positions turn pairs"
        )
    return size


def require_whole_heads(config: Fields) -> None:
    """Raises: ConfigError if a family that rotates whole heads is to rotate a part of them."""
    for fields in (config, *_spelt(config)):
        if fields.raw.get(PART, 1) != 1:
            raise fields.wrong(PART, "1, as this family rotates each head as a whole")


def yarn_scale(config: Fields) -> float:
    """Return what a stretched model with `mscale_all_dim` multiplies queries and keys with."""
    for fields in _spelt(config):
        kind = fields.raw.get("rope_type", fields.raw.get("type"))
        if kind == "yarn" and (all_dim := fields.optional("mscale_all_dim")):
            return _mscale(fields.number("factor"), all_dim)
    return 1.0


def _spelt(config: Fields) -> list[Fields]:
    """Return what the config says of rotary positions, in each spelling that it has."""
    found = ((key, config.raw.get(key)) for key in SPELLINGS)
    return [Fields(f"{config.where}: {key}", raw) for key, raw in found if isinstance(raw, dict)]


def _read(config: Fields, spelling: str, size: int) -> RopeSpec:
    raw = config.raw.get(spelling) or {}
    if not isinstance(raw, dict):
        raise config.wrong(spelling, "an object")
    rope = Fields(f"{config.where}: {spelling}", raw)
    kind = _rope_type(rope)
    theta = (rope if "rope_theta" in raw else config).number("rope_theta", 10000.0, above=1.0)
    match kind:
        case "linear":
            return RopeSpec(size, theta, kind, rope.number("factor"))
        case "llama3":
            return _llama3(size, theta, rope, _original_positions(config, rope))
        case "yarn":
            return _yarn(size, theta, rope, _original_positions(config, rope))
    return RopeSpec(size, theta)


def _rope_type(rope: Fields) -> str:
    """Return the rope_type. Raises: ConfigError unless it is supported, with each key beside it."""
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if not isinstance(kind, str) or kind not in KEYS_BY_TYPE:
        raise ConfigError(
            f"{rope.where}: rope_type {kind!r} is not one of {', '.join(KEYS_BY_TYPE)}"
        )
    for key in rope.raw:
        if key not in KEYS_BY_TYPE[kind] | COMMON_KEYS:
            raise ConfigError(f"{rope.where}: {key} is not supported with rope_type {kind!r}")
    return kind


def _original_positions(config: Fields, rope: Fields) -> int:
    """Return the model's context before it was stretched.

    As in transformers, the key outside wins over the one inside. Without either, the model was
    never stretched.
    """
    key = "original_max_position_embeddings"
    for fields in (config, rope):
        if key in fields.raw:
            return fields.count(key)
    return config.count("max_position_embeddings", most=MOST_POSITIONS)


def _llama3(size: int, theta: float, rope: Fields, original_positions: int) -> RopeSpec:
    factor, low, high = (
        rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor {low:g}")
    return RopeSpec(size, theta, "llama3", factor, original_positions, low, high)


def _yarn(size: int, theta: float, rope: Fields, original_positions: int) -> RopeSpec:
    factor = rope.number("factor")
    attention, mscale, all_dim = (
        rope.optional(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention is None:
        attention = (
            _mscale(factor, mscale) / _mscale(factor, all_dim)
            if mscale and all_dim
            else _mscale(factor)
        )
    return RopeSpec(
        size,
        theta,
        "yarn",
        factor,
        original_positions,
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        attention_factor=attention,
        truncate=rope.flag("truncate", True),
    )


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
