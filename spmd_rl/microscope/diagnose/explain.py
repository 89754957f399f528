"""Why two outputs on the same input differ: which known way of computing the op gives each side's
bits.

The inputs are the recorded ones, so a variant that gives a side's bits in every row is that side's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels import linear_fp32
from spmd_rl.kernels.rowwise.row_hash import wide_bits
from spmd_rl.microscope.diagnose.compare import Evidence
from spmd_rl.microscope.diagnose.variants import Compute, Together, variants, variants_from_source
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.taps.points import BEFORE, Point
from spmd_rl.microscope.taps.taps import Values
from spmd_rl.model.spec import ModelSpec

INPUTS: dict[str, tuple[str, ...]] = {  # the points an op reads
    "q_proj": ("input_norm",),
    "k_proj": ("input_norm",),
    "v_proj": ("input_norm",),
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "attention": ("q", "k", "v"),
    "o_proj": ("attention",),
    "gate_proj": ("post_norm",),
    "up_proj": ("post_norm",),
    "act": ("gate_proj", "up_proj"),
    "down_proj": ("act",),
    "logits": ("final_norm",),
    "logprob": ("logits",),
}

# if an op makes its inputs
SOURCES = {"q": "input_norm", "k": "input_norm", "v": "input_norm", "act": "post_norm"}

LOGIT_ROWS = 1024
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Match:
    """A variant, the number of rows whose bits it gives, and how many of these differ between the
    sides.
    """

    says: str
    rows: int
    unequal: int = 0


@dataclass(frozen=True)
class _Way:
    """A variant, what it is given, and the rows that it may explain."""

    says: str
    compute: Compute
    inputs: tuple[Tensor, ...]
    source: Tensor | None
    rows: Tensor


@dataclass(frozen=True)
class Trial:
    """Tries variants on the recorded inputs. `model` has the weights, under Hugging Face's module
    names.

    `split`: of the keys, where a side has one.
    """

    evidence: Evidence
    case: Case
    model: Any
    spec: ModelSpec
    split: int = 0

    def matches(self, point: Point, values: Values, step_of: Sequence[int]) -> list[Match]:
        """The variant that gives all rows of `values`; if none does, those that give some, each the
        rows left over.

        Only rows that both sides have. `step_of` is the number of the step that computed each row.
        """
        shared = left = self.evidence.fed.seen(point) & self.evidence.other.seen(point)
        fed, other = (
            wide_bits(one.table[point]) for one in (self.evidence.fed, self.evidence.other)
        )
        apart = shared & (fed != other).any(1)
        total, partly = int(shared.sum()), []
        for way in self._ways(point, values):
            given = way.rows & self._given(way, point, values, step_of, left)
            if int((given & shared).sum()) == total:
                return [Match(way.says, total, int(apart.sum()))]
            if rows := int((given & left).sum()):
                partly.append(Match(way.says, rows, int((given & left & apart).sum())))
                left = left & ~given
        return partly

    def _ways(self, point: Point, values: Values) -> Iterator[_Way]:
        """Where `values` do not show what the op reads, it may have made that itself, by any way of
        a product.
        """
        inputs, shown = (
            self._inputs(point) or self._stream(point),
            torch.ones(self.case.num_rows, dtype=torch.bool),
        )
        for says, compute in variants(point.op) if inputs else ():
            yield _Way(says, compute, tuple(inputs), None, shown)
        if point.op not in SOURCES:
            return
        for op in INPUTS[point.op]:
            read = Point(point.layer, op)
            shown = shown & values.seen(read) if read in values.table else torch.zeros_like(shown)
        source = self._input(Point(point.layer, SOURCES[point.op]))
        for says, compute in (
            () if source is None or shown.all() else variants_from_source(point.op)
        ):
            yield _Way(says, compute, (), source, ~shown)

    def _inputs(self, point: Point) -> list[Tensor]:
        found = [self._input(Point(point.layer, op)) for op in INPUTS.get(point.op, ())]
        if all(one is not None for one in found):
            return [one for one in found if one is not None]
        hidden = self._input(Point(point.layer, "final_norm"))
        return [self._logits(hidden)] if point.op == "logprob" and hidden is not None else []

    def _input(self, point: Point) -> Tensor | None:
        """What the other side gave; in rows where it shows no such point, what the side that was
        fed made itself.
        """
        fed, other = self.evidence.fed, self.evidence.other
        if point not in fed.table or point not in other.table:
            return other.table.get(point, fed.table.get(point))
        known = other.known[point][:, None]
        kept = torch.promote_types(fed.table[point].dtype, other.table[point].dtype)
        return torch.where(known, other.table[point].to(kept), fed.table[point].to(kept))

    def _logits(self, hidden: Tensor) -> Tensor:
        """As the contract has them, where neither side shows its own; of the rows that predict a
        token.
        """
        weight = _module(self.model, Point(0, "logits")).weight
        logits = torch.zeros(len(hidden), len(weight))
        rows = torch.from_numpy(
            np.concatenate([s + self.case.scored(n) for n, s in enumerate(self.case.offsets)])
        )
        for part in rows.split(LOGIT_ROWS):
            logits[part] = linear_fp32(hidden[part].to(weight.device), weight).cpu()
        return logits

    def _stream(self, point: Point) -> list[Tensor]:
        """For a norm of the residual stream: the stream, added up as far as `point`."""
        if point.op not in (*_NORMS, "final_norm"):
            return []
        table = self.evidence.other.table
        added = [
            one for one in table if one.op in ("o_proj", "down_proj") and one.place < point.place
        ]
        stream = table[Point(BEFORE, "embed")]
        for one in sorted(added, key=lambda one: one.place):
            stream = stream + table[one]
        return [stream]

    def _given(
        self, way: _Way, point: Point, values: Values, step_of: Sequence[int], left: Tensor
    ) -> Tensor:
        """Which rows have the variant's bits. Shape: [rows] bool."""
        given, device = torch.zeros_like(left), next(self.model.parameters()).device
        seen = values.known[point] if point.op == "attention" else values.seen(point)
        for rows in self._together(point, seen, step_of):
            at = rows.numpy()
            together = Together(
                x=tuple(one[rows].to(device) for one in way.inputs),
                module=_module(self.model, point),
                spec=self.spec,
                positions=torch.from_numpy(self.case.positions[at]).to(device),
                targets=torch.from_numpy(self.case.targets[at]).to(device),
                temperatures=torch.from_numpy(self.case.temperatures[at]).to(device),
                wanted=left[rows],
                split=self.split,
                source=None if way.source is None else way.source[rows].to(device),
                projections=tuple(
                    _module(self.model, Point(point.layer, op)) for op in INPUTS.get(point.op, ())
                ),
            )
            out = way.compute(together).flatten(1).cpu()
            given[rows] = (wide_bits(out) == wide_bits(values.table[point][rows])).all(1)
        return given

    def _together(self, point: Point, seen: Tensor, step_of: Sequence[int]) -> Iterator[Tensor]:
        """Rows of one step; for attention, of one sequence from its start."""
        numbers = torch.tensor(step_of)
        if point.op == "attention":
            numbers = torch.from_numpy(
                np.repeat(np.arange(len(self.case.sequences)), self.case.lengths)
            )
        for number in numbers[seen].unique().tolist():
            yield (seen & (numbers == number)).nonzero()[:, 0]


def _module(model: Any, point: Point) -> Any:
    if point.op == "logprob":
        return None
    if point.op == "logits":
        return model.lm_head if model.lm_head is not None else model.model.embed_tokens
    if point.op == "final_norm":
        return model.model.norm
    layer = model.model.layers[point.layer]
    if point.op in _NORMS:
        return getattr(layer, _NORMS[point.op])
    if point.op in ("q", "k"):  # its norm, where that is part of the op
        return getattr(layer.self_attn, f"{point.op}_norm", None)
    return getattr(layer.mlp if hasattr(layer.mlp, point.op) else layer.self_attn, point.op, None)
