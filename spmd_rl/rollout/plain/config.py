"""Settings of the plain engine."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import CacheFormat, Exponents
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.rollout.native.config import NativeEngineConfig


@dataclass(frozen=True)
class PlainEngineConfig:
    """The engine of models that transformers computes: it is correct and simple, not fast."""

    promises_bits: ClassVar[bool] = False  # a cache of transformers has other bits than a whole row
    weights: ClassVar[WeightFormat] = "full"
    cache: ClassVar[CacheFormat] = "full"
    cache_exponents: ClassVar[Exponents] = (0, 0)
    maps_peers: ClassVar[bool] = False
    returns_kept_sets: ClassVar[bool] = True
    sleep_weights: ClassVar[bool] = False  # keys and values alone are given back
    # transformers allocates keys and values as it goes; the plan counts them by the token
    num_pages: ClassVar[int] = 0
    page_tokens: ClassVar[int] = 1
    max_step_tokens: ClassVar[int] = 0
    memory_fraction: ClassVar[float] = 0.9

    kind: Literal["plain"] = "plain"  # which engine generates
    max_batch: int = 256  # sequences running at once
    dtype: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    load_weights: bool = True  # false leaves the parameters to the first push

    def memory_beside(self, weight_bytes: int, on_gpu: bool, tp: int) -> list[TagBytes]:
        """Return what a rank keeps besides weights, keys and values and a step's work: nothing."""
        return []

    def __post_init__(self) -> None:
        require(self.max_batch >= 1, "max_batch", self.max_batch, "at least 1")
        fits = self.dtype in ("auto", "float32", "bfloat16")
        require(fits, "dtype", self.dtype, '"auto", "float32" or "bfloat16"')


def in_place_of(native: NativeEngineConfig) -> PlainEngineConfig:
    """Return the settings of a plain engine in place of a native one.

    Raises: ConfigError for a setting that the plain engine does not have.
    """
    own = {one.name for one in fields(PlainEngineConfig)} - {"kind"}
    values: dict[str, Any] = {one.name: getattr(native, one.name) for one in fields(native)}
    for one in fields(native):
        if one.name not in {*own, "kind"} and values[one.name] != one.default is not MISSING:
            raise ConfigError(
                f"engine.{one.name} = {values[one.name]!r} is for engine.kind = 'native': a model "
                "that transformers computes has the plain engine"
            )
    return PlainEngineConfig(**{name: values[name] for name in own})
