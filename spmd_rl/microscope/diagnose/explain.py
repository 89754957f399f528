"""Explanation of a difference: which known way of computing the op gives each side's bits.

The inputs are the recorded ones. So a variant that gives a side's bits in every row is the
arithmetic of that side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import linear_fp32
from spmd_rl.microscope.diagnose.compare import PatchEvidence
from spmd_rl.microscope.diagnose.kernel_names import KernelInfo
from spmd_rl.microscope.diagnose.ulp import rows_differ
from spmd_rl.microscope.diagnose.variant_inputs import Compute, VariantInputs
from spmd_rl.microscope.diagnose.variants import variants, variants_from_source
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.taps.points import BEFORE, Point, definition
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.layers.block import NORM_OPS
from spmd_rl.model.layers.layer import PointDef
from spmd_rl.model.spec import ModelSpec

LOGIT_ROWS = 1024


@dataclass(frozen=True)
class VariantMatch:
    """A variant and the number of rows whose bits it gives.

    `num_unequal_rows` of these rows differ between the sides.
    """

    description: str
    num_rows: int
    num_unequal_rows: int = 0


@dataclass(frozen=True)
class SideExplanation:
    """The kernels that one side ran for an op, and the variants that give its bits."""

    kernels: tuple[KernelInfo, ...]
    matches: tuple[VariantMatch, ...]


@dataclass(frozen=True)
class Explanation:
    """Why the outputs of one op differ on the same input."""

    left: SideExplanation
    right: SideExplanation


@dataclass(frozen=True)
class _Candidate:
    """A variant with its inputs, and the rows that it may explain."""

    description: str
    compute: Compute
    inputs: tuple[Tensor, ...]
    source: Tensor | None
    rows: Tensor


@dataclass(frozen=True)
class VariantSearch:
    """Tries variants on the recorded inputs.

    `model` has the weights, under Hugging Face's module names. `split` is the size of the splits of
    keys, if a side has them, and `exponents` are the scales of keys and values in codes.
    """

    evidence: PatchEvidence
    case: ReplayCase
    model: Any
    spec: ModelSpec
    split: int = 0
    exponents: Exponents | None = None

    def matches(self, point: Point, values: ValueTap, step_of: Sequence[int]) -> list[VariantMatch]:
        """Return the variant that gives all rows of `values` at `point`.

        If none does, return those that give some, each with the rows that are left by then. Only
        rows that both sides observed count. `step_of` is the step that computed each row.
        """
        shared, unequal_rows = self._shared_rows(point)
        left = shared
        partial_matches = []
        for candidate in self._candidates(point, values):
            given = candidate.rows & self._rows_given(candidate, point, values, step_of, left)
            if not (shared & ~given).any():
                return [_match(candidate, shared, unequal_rows)]
            if (given & left).any():
                partial_matches.append(_match(candidate, given & left, unequal_rows))
                left = left & ~given
        return partial_matches

    def _shared_rows(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return the rows that both sides observed, and those of them that differ.

        Shape: both [rows] bool.
        """
        patched, other = self.evidence.patched, self.evidence.other
        shared = patched.observed(point) & other.observed(point)
        return shared, shared & rows_differ(patched.table[point], other.table[point])

    def _candidates(self, point: Point, values: ValueTap) -> Iterator[_Candidate]:
        """Yield the variants of the op.

        If `values` do not show what the op reads, the op may have computed that itself, by any
        variant of a product.
        """
        inputs = self._inputs(point) or self._residual_stream(point)
        all_rows = torch.ones(self.case.num_rows, dtype=torch.bool)
        if inputs:
            is_product = self._definition(point).is_product
            for description, compute in variants(point.op, is_product):
                yield _Candidate(description, compute, tuple(inputs), None, all_rows)
        source = self._source(point)
        if source is None:
            return
        shown = self._rows_with_inputs(point, values)
        if shown.all():
            return
        for description, compute in variants_from_source(point.op):
            yield _Candidate(description, compute, (), source, ~shown)

    def _source(self, point: Point) -> Tensor | None:
        """Return what the op reads if it begins with its own projections."""
        source_op = self._definition(point).source
        return self._recorded_input(Point(point.layer, source_op)) if source_op else None

    def _rows_with_inputs(self, point: Point, values: ValueTap) -> Tensor:
        """Return in which rows `values` show all that the op reads. Shape: [rows] bool."""
        shown = torch.ones(self.case.num_rows, dtype=torch.bool)
        for op in self._definition(point).inputs:
            read = Point(point.layer, op)
            if read not in values.table:
                return torch.zeros_like(shown)
            shown = shown & values.observed(read)
        return shown

    def _inputs(self, point: Point) -> list[Tensor]:
        """Return the recorded inputs of an op, or nothing if one of them is not recorded."""
        read = [Point(point.layer, op) for op in self._definition(point).inputs]
        inputs = [self._recorded_input(one) for one in read]
        if all(tensor is not None for tensor in inputs):
            return [tensor for tensor in inputs if tensor is not None]
        hidden = self._recorded_input(Point(point.layer, "final_norm"))
        return [self._logits(hidden)] if point.op == "logprob" and hidden is not None else []

    def _recorded_input(self, point: Point) -> Tensor | None:
        """Return the output of `point` on the other side.

        In rows where that side has no such point, it is what the patched side computed.
        """
        patched, other = self.evidence.patched.table, self.evidence.other.table
        if point not in patched or point not in other:
            return other.get(point, patched.get(point))
        dtype = torch.promote_types(patched[point].dtype, other[point].dtype)
        is_available = self.evidence.other.available[point][:, None]
        return torch.where(is_available, other[point].to(dtype), patched[point].to(dtype))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the contract's logits of the rows that predict a token.

        They stand for logits that neither side shows.
        """
        weight = self._module(Point(0, "logits")).weight
        logits = torch.zeros(len(hidden), len(weight))
        rows = torch.from_numpy(
            np.concatenate(
                [
                    offset + self.case.scored_positions(number)
                    for number, offset in enumerate(self.case.offsets)
                ]
            )
        )
        for part in rows.split(LOGIT_ROWS):
            logits[part] = linear_fp32(hidden[part].to(weight.device), weight).cpu()
        return logits

    def _residual_stream(self, point: Point) -> list[Tensor]:
        """Return the residual stream, added up to `point`, if it is a norm of that stream.

        The last two tensors are the terms of its last sum.
        """
        if point.op not in (*NORM_OPS, "final_norm"):
            return []
        table = self.evidence.other.table
        added = [
            term
            for layer, block in enumerate(self.spec.blocks)
            for term in (Point(layer, one.op) for one in block.points() if one.is_added)
            if term.order < point.order
        ]
        terms = [Point(BEFORE, "embed"), *added]
        if not all(term in table for term in terms):
            return []
        stream = last = table[terms[0]]
        before = torch.zeros_like(stream)
        for term in added:
            before, last = stream, table[term]
            stream = before + last
        return [stream, before, last]

    def _rows_given(
        self,
        candidate: _Candidate,
        point: Point,
        values: ValueTap,
        step_of: Sequence[int],
        left: Tensor,
    ) -> Tensor:
        """Return which rows have the candidate's bits. Shape: [rows] bool."""
        given = torch.zeros_like(left)
        is_attention = point.op == "attention"
        rows_read = values.available[point] if is_attention else values.observed(point)
        for rows in self._computed_together(point, rows_read, step_of):
            inputs = self._variant_inputs(candidate, point, rows, left)
            out = candidate.compute(inputs).flatten(1).cpu()
            given[rows] = ~rows_differ(out, values.table[point][rows])
        return given

    def _variant_inputs(
        self, candidate: _Candidate, point: Point, rows: Tensor, left: Tensor
    ) -> VariantInputs:
        device = self._device
        return VariantInputs(
            x=tuple(tensor[rows].to(device) for tensor in candidate.inputs),
            module=self._module(point),
            spec=self.spec,
            positions=self._select(self.case.positions, rows),
            targets=self._select(self.case.targets, rows),
            temperatures=self._select(self.case.temperatures, rows),
            wanted=left[rows],
            split=self.split,
            exponents=self.exponents,
            source=None if candidate.source is None else candidate.source[rows].to(device),
            projections=self._projections(point),
        )

    def _definition(self, point: Point) -> PointDef:
        """Return what the layer of a recorded point says of it."""
        found = definition(point, self.spec)
        assert found is not None
        return found

    def _module(self, point: Point) -> Any:
        """Return the module that has the weights of `point`, or None."""
        model = self.model
        if point.op == "logprob":
            return None
        if point.op == "logits":
            return model.lm_head if model.lm_head is not None else model.model.embed_tokens
        if point.op == "final_norm":
            return model.model.norm
        layer, found = model.model.layers[point.layer], self._definition(point)
        # the norm of an op that ends with one, if the model has it
        name = found.norm or (found.output_of if found.is_product else "")
        return dict(layer.named_modules()).get(name) if name else None

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def _select(self, table: NDArray[Any], rows: Tensor) -> Tensor:
        """Return `rows` of a table of the case, on the model's device."""
        return torch.from_numpy(table[rows.numpy()]).to(self._device)

    def _projections(self, point: Point) -> tuple[Any, ...]:
        """Return the modules of the points that the op reads."""
        return tuple(self._module(Point(point.layer, op)) for op in self._definition(point).inputs)

    def _computed_together(
        self, point: Point, rows: Tensor, step_of: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield the rows of each step; for attention, of each sequence from its start."""
        groups = torch.tensor(step_of)
        if point.op == "attention":
            numbers = np.arange(len(self.case.sequences))
            groups = torch.from_numpy(np.repeat(numbers, self.case.lengths))
        for group in groups[rows].unique().tolist():
            yield (rows & (groups == group)).nonzero()[:, 0]


def _match(candidate: _Candidate, rows: Tensor, unequal_rows: Tensor) -> VariantMatch:
    """Return the match of a variant that gives the bits of `rows`."""
    num_unequal = int((rows & unequal_rows).sum())
    return VariantMatch(candidate.description, int(rows.sum()), num_unequal)
