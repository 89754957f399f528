"""Keys and values that are in 8 bits with `cache = "e4m3"`, and all formats of a role. No torch."""

from __future__ import annotations

from typing import Literal, Protocol

from spmd_rl.config.combinations import Combination, other_than
from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_weights import weights_sentence
from spmd_rl.model.spec import ModelSpec

CacheFormat = Literal["full", "e4m3"]
Exponents = tuple[int, int]  # of two: the scales of keys, and of values
MOST_EXPONENT = 32
FORMATS = ("weights", "cache", "cache_exponents")  # settings that engine and trainer share
CACHE_REFUSED = (
    Combination(
        {"cache_exponents": other_than((0, 0)), "cache": other_than("e4m3")},
        "{0}: expected (0, 0) without cache = 'e4m3': other keys and values have no scales",
    ),
)
OTHER_ARRAYS = (
    'cache = "e4m3" is for layers that keep keys and values, and this model has layers that keep '
    'other arrays: set engine.cache and trainer.cache to "full"'
)


class Formats(Protocol):
    """Settings of an engine, a trainer or a frozen model that say what is in 8 bits."""

    @property
    def weights(self) -> WeightFormat: ...

    @property
    def cache(self) -> CacheFormat: ...

    @property
    def cache_exponents(self) -> Exponents: ...


def check_exponents(exponents: Exponents) -> None:
    """Raise a ConfigError for scales that are too large or too small."""
    fits = all(abs(exponent) <= MOST_EXPONENT for exponent in exponents)
    expected = f"two exponents from -{MOST_EXPONENT} to {MOST_EXPONENT}"
    require(fits, "cache_exponents", exponents, expected)


def kv_exponents(cfg: Formats) -> Exponents | None:
    """Return the scales of keys and values in 8 bits, as exponents of two; None of others."""
    return cfg.cache_exponents if cfg.cache == "e4m3" else None


def require_keys(spec: ModelSpec) -> None:
    """Raise a ConfigError for a model with layers that keep other arrays than keys and values."""
    caches = (block.cache() for block in spec.distinct_blocks())
    if any(one is not None and one.arrays and not one.queries_per_key for one in caches):
        raise ConfigError(OTHER_ARRAYS)


def cache_rule(exponents: Exponents) -> str:
    """Return how keys and values are rounded, as a numeric contract and a plan say it."""
    keys, values = exponents
    return (
        "e4m3 codes of keys and values after norm and rotation, to nearest even; "
        f"scales 2^{keys} of keys and 2^{values} of values; what is beyond 448 scales is 448"
    )


def format_sentences(cfg: Formats) -> dict[str, str]:
    """Return what to say of a role's formats in a plan and at the start of a run, by setting."""
    said = {"weights": weights_sentence(cfg.weights)}
    if (exponents := kv_exponents(cfg)) is not None:
        said["cache"] = f"of trainer and engine: {cache_rule(exponents)}"
    return {name: sentence for name, sentence in said.items() if sentence}
