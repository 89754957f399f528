"""Settings of the plain engine."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from spmd_rl.errors import ConfigError
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.rollout.kv_pages import UnpagedConfig
from spmd_rl.rollout.native.config import NativeEngineConfig


@dataclass(frozen=True)
class PlainEngineConfig(UnpagedConfig):
    """The engine of models that transformers computes: it is correct and simple, not fast."""

    returns_kept_sets: ClassVar[bool] = True
    sleep_weights: ClassVar[bool] = False  # keys and values alone are given back
    memory_fraction: ClassVar[float] = 0.9

    kind: Literal["plain"] = "plain"  # which engine generates
    max_batch: int = 256  # sequences running at once
    dtype: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    load_weights: bool = True  # false leaves the parameters to the first push

    def memory_beside(self, weight_bytes: int, on_gpu: bool, tp: int) -> list[TagBytes]:
        """Return what a rank keeps besides weights, keys and values and a step's work: nothing."""
        return []

    def __post_init__(self) -> None:
        self._check_sizes()


def in_place_of(native: NativeEngineConfig) -> PlainEngineConfig:
    """Return the settings of a plain engine in place of a native one.

    Raises: ConfigError for a setting that the plain engine does not have.
    """
    own = {one.name for one in fields(PlainEngineConfig)} - {"kind"}
    values: dict[str, Any] = {one.name: getattr(native, one.name) for one in fields(native)}
    for one in fields(native):
        is_set = one.default is not MISSING and values[one.name] != one.default
        if is_set and one.name not in {*own, "kind"}:
            raise ConfigError(
                f"engine.{one.name} = {values[one.name]!r} is for engine.kind = 'native': a model "
                "that transformers computes has the plain engine"
            )
    return PlainEngineConfig(**{name: values[name] for name in own})
