"""VariantInputs: what a variant of an op computes from, and the types of variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.spec import ModelSpec


@dataclass(frozen=True)
class VariantInputs:
    """Inputs of an op for the rows of one step, or for attention of one sequence from its start.

    `targets` are the next tokens. `wanted` rows are those to explain. `split` is the size of
    attention's splits of keys, or 0; `exponents` are the scales of keys and values in codes. For an
    op that computes `x` itself, `source` and `projections` do so.
    Shape: x [R, ...] each; source [R, C]; positions, targets, temperatures and wanted [R].
    """

    x: tuple[Tensor, ...]
    module: Any
    spec: ModelSpec
    positions: Tensor
    targets: Tensor
    temperatures: Tensor
    wanted: Tensor
    split: int = 0
    exponents: Exponents | None = None
    source: Tensor | None = None
    projections: tuple[Any, ...] = ()


Compute = Callable[[VariantInputs], Tensor]
Variant = tuple[str, Compute]
