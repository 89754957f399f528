"""Layout of a dump of hidden states (docs/mismatch.md): names, shapes and metadata.

Shape letters: N tokens of all sequences end to end, M rows that have logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from spmd_rl.config.likely import likely_name
from spmd_rl.errors import DataError
from spmd_rl.microscope.taps.points import (
    AFTER_LAYERS,
    BEFORE,
    BEFORE_LAYERS,
    OPS,
    Point,
    definition,
    is_in_layer,
    know_points,
)
from spmd_rl.model.spec import ModelSpec

FORMAT = "hidden-states-1"
TOKENS, POSITIONS, SCORED = "tokens", "positions", "scored"
REQUIRED_METADATA = ("format", "program", "model", "dtype")
INTEGERS = ("I64", "I32")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCORED_OPS = ("logits", "logprob")
MAX_METADATA, MAX_CHARACTERS = 32, 200

_LAYERS = "layers"


def _layer_ops() -> list[str]:
    return [op for op in OPS if is_in_layer(op)]


@dataclass(frozen=True)
class StoredHeader:
    """The type and the shape of a tensor in a dump, as its header has them."""

    dtype: str
    shape: tuple[int, ...]


def tensor_name(point: Point) -> str:
    """Return the name of a point's tensor."""
    return f"{_LAYERS}.{point.layer}.{point.op}" if is_in_layer(point.op) else point.op


def point_of(name: str, num_layers: int) -> Point | None:
    """Return the point of a tensor's name, or None if there is none."""
    if name in BEFORE_LAYERS:
        return Point(BEFORE, name)
    if name in AFTER_LAYERS:
        return Point(num_layers, name)
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != _LAYERS or parts[2] not in _layer_ops():
        return None
    layer = int(parts[1]) if parts[1].isascii() and parts[1].isdigit() else num_layers
    return Point(layer, parts[2]) if layer < num_layers and str(layer) == parts[1] else None


def check_metadata(where: str, metadata: Mapping[str, str]) -> None:
    """Raise a DataError unless `metadata` is that of a dump, and fit to be printed."""
    if metadata.get("format") != FORMAT:
        raise DataError(
            where, f"its metadata lacks format = {FORMAT!r}, so it is no dump of hidden states"
        )
    for key in REQUIRED_METADATA:
        if not metadata.get(key):
            raise DataError(where, f"its metadata lacks {key!r}")
    if metadata["dtype"] not in DTYPES:
        raise DataError(where, f"its metadata's dtype is none of {', '.join(DTYPES)}")
    texts = [text for item in metadata.items() for text in item]
    if len(metadata) > MAX_METADATA or not all(map(_is_printable, texts)):
        raise DataError(
            where,
            f"its metadata has more than {MAX_METADATA} entries, or one that is not a printable "
            f"line of at most {MAX_CHARACTERS} characters",
        )


def _is_printable(text: str) -> bool:
    return text.isprintable() and len(text) <= MAX_CHARACTERS


def check_points(
    where: str, headers: Mapping[str, StoredHeader], spec: ModelSpec
) -> dict[Point, str]:
    """Return the names of the tensors by point.

    Raises: DataError for a tensor that has no place, or another type or shape than its point's.
    """
    know_points(spec.blocks)
    num_rows, num_scored = _num_rows(where, headers)
    points: dict[Point, str] = {}
    for name in sorted(set(headers) - {TOKENS, POSITIONS, SCORED}):
        point = point_of(name, spec.num_layers)
        if point is None:
            raise DataError(where, f"{name!a} is no point of this model{_nearest(name, spec)}")
        rows = num_scored if point.op in SCORED_OPS else num_rows
        if not rows:
            raise DataError(where, f"it holds {name}, but 'scored' does not say of which rows")
        if (found := definition(point, spec)) is None:
            raise DataError(where, f"{name!a} is no point of this layer")
        _check_tensor(where, name, headers[name], (rows, prod(found.shape)))
        points[point] = name
    if not points:
        raise DataError(where, "it holds no point, such as layers.0.attention")
    _require_all_layers(where, points, spec)
    return points


def _num_rows(where: str, headers: Mapping[str, StoredHeader]) -> tuple[int, int]:
    """Return N and M. Raises: DataError unless the integer tensors are vectors that fit."""
    for name in (TOKENS, POSITIONS):
        if name not in headers:
            raise DataError(where, f"it lacks the tensor {name!r}")
    for name in (TOKENS, POSITIONS, SCORED):
        header = headers.get(name)
        if header and (header.dtype not in INTEGERS or len(header.shape) != 1):
            raise DataError(where, f"{name!r} is not a vector of 32- or 64-bit integers")
    num_rows = headers[TOKENS].shape[0]
    if not num_rows or headers[POSITIONS].shape != (num_rows,):
        raise DataError(where, f"'tokens' has {num_rows} entries and 'positions' another number")
    return num_rows, headers[SCORED].shape[0] if SCORED in headers else 0


def _check_tensor(where: str, name: str, header: StoredHeader, wanted: tuple[int, int]) -> None:
    """Raise a DataError unless a tensor is of floating-point numbers, [rows, width] flattened."""
    if header.dtype not in FLOATS:
        raise DataError(where, f"{name} is {header.dtype}: use F32, BF16 or F16")
    rows, columns = wanted
    num_columns = 1
    for size in header.shape[1:]:
        num_columns *= size
    if not header.shape or header.shape[0] != rows or num_columns != columns:
        raise DataError(
            where, f"{name} is {list(header.shape)}, and the model asks for {list(wanted)}"
        )


def _require_all_layers(where: str, points: Mapping[Point, str], spec: ModelSpec) -> None:
    """Raise a DataError if an op is there in some only of the layers that have it."""
    for op in _layer_ops():
        layers = [point.layer for point in points if point.op == op]
        having = {number for number, block in enumerate(spec.blocks) if block.has_point(op)}
        missing = sorted(having - set(layers))
        if layers and missing:
            there, lacking = tensor_name(Point(min(layers), op)), tensor_name(Point(missing[0], op))
            raise DataError(where, f"it lacks {lacking}, though it holds {there}")


def _nearest(name: str, spec: ModelSpec) -> str:
    """Return the end of a sentence that names the point nearest to `name`; "" if none is near."""
    known: Sequence[str] = [
        *BEFORE_LAYERS,
        *AFTER_LAYERS,
        *(tensor_name(Point(n, op)) for n in range(spec.num_layers) for op in _layer_ops()),
    ]
    likely = likely_name(name, known)
    return f"; the nearest is {likely!r}" if likely else ""
