"""One examination: two forward passes are compared, and their differences explained in words."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd_rl.microscope.diagnose.compare import Comparison, PatchEvidence, PointResult, compare
from spmd_rl.microscope.diagnose.explain import Explanation, SideExplanation, VariantSearch
from spmd_rl.microscope.diagnose.kernel_profile import KernelTrace, kernels_of
from spmd_rl.microscope.foreign.dump import DumpPass
from spmd_rl.microscope.limits import first_line
from spmd_rl.microscope.page.tolerance import first_beyond, tolerance_sentences
from spmd_rl.microscope.page.verdict import verdict
from spmd_rl.microscope.ranks.ranks_pass import RanksPass
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec


@dataclass(frozen=True)
class ReplaySetup:
    """Which passes are compared, and on what.

    `weights` describes the weights, and `drew_samples` is set if they drew the samples; if not,
    `other_step` is a step of the run whose samples can be replayed under theirs. `notes` are
    sentences on what is replayed, and `limits` name what is not. `doubt` is said if all bits agree.
    Differences on the same input of up to `tolerance`, as a share of the row's largest output,
    count as rounding; None: none do.
    """

    case: ReplayCase
    left: ForwardPass
    right: ForwardPass
    model: str
    planted: str | None = None
    weights: str = ""
    drew_samples: bool = False
    other_step: int | None = None
    command: str = ""
    run: str = ""
    notes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    doubt: str = ""
    tolerance: float | None = None

    @property
    def names(self) -> tuple[str, str]:
        return self.left.name, self.right.name

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.left.dtype, self.right.dtype

    @property
    def network(self) -> Any:
        """The right side's network, which has the weights, or the left side's if it has none, or
        if it alone has adapters.
        """
        left, right = self.left.model, self.right.model
        return left if right is None or (_has_adapters(left) > _has_adapters(right)) else right


def _has_adapters(model: Any) -> bool:
    return isinstance(model, CausalLM) and bool(model.lora.rank)


@dataclass(frozen=True)
class RecordedLogprobs:
    """How many log-probs recorded with the samples the engine computes again, bit for bit."""

    num_equal: int
    num_recorded: int
    sentence: str


@dataclass(frozen=True)
class Examination:
    """The results for one setup.

    `explanations` has the first point of each op that introduces a difference.
    """

    setup: ReplaySetup
    comparison: Comparison
    explanations: Mapping[Point, Explanation]
    verdict: str

    @property
    def agree(self) -> bool:
        """Whether all bits agree or, with a tolerance, all but rounding."""
        tolerance = self.setup.tolerance
        if tolerance is None or self.comparison.problems:
            return self.comparison.agree
        return first_beyond(self.comparison, tolerance) is None


def examine(setup: ReplaySetup) -> Examination:
    """Compare the two passes. If they differ in the same dtype, explain the differences."""
    comparison = compare(setup.left, setup.right, setup.case)
    first_of_op: dict[str, PointResult] = {}
    for result in comparison.results:
        if result.status == "introduced":
            first_of_op.setdefault(result.point.op, result)
    explanations: dict[Point, Explanation] = {}
    if first_of_op and setup.dtypes[0] == setup.dtypes[1]:
        explanations = _explain(setup, comparison, list(first_of_op.values()))
    return Examination(setup, comparison, explanations, _verdict(setup, comparison, explanations))


def recorded_logprobs(setup: ReplaySetup, comparison: Comparison) -> RecordedLogprobs | None:
    """Compare the engine's log-probs with the recorded ones; None if there are none."""
    logprobs = comparison.logprobs
    if logprobs is None or "engine" not in setup.names:
        return None
    recorded = torch.from_numpy(setup.case.recorded)[logprobs.rows]
    is_recorded = ~recorded.isnan()
    num_recorded = int(is_recorded.sum())
    if not num_recorded:
        return None
    engine = (logprobs.left, logprobs.right)[setup.names.index("engine")]
    num_equal = int((engine == recorded)[is_recorded].sum())
    return RecordedLogprobs(num_equal, num_recorded, _on_recorded(setup, num_equal, num_recorded))


def _on_recorded(setup: ReplaySetup, num_equal: int, num_recorded: int) -> str:
    """Say what this replay can tell of the log-probs that were recorded with the samples."""
    if setup.drew_samples:
        return (
            f"Of the {num_recorded:,} log-probs recorded with the samples, "
            f"the engine gives {num_equal:,} again."
        )
    other = "" if setup.other_step is None else f"; --step {setup.other_step} replays some that can"
    return (
        f"The {num_recorded:,} log-probs recorded with the samples cannot be confirmed here: only "
        f"the weights that drew them give them again, and others were replayed{other}."
    )


def versions(setup: ReplaySetup) -> dict[str, str]:
    """Return what the bits may depend on: the numeric contract, and versions of libraries."""
    facts: dict[str, Any] = {"torch": torch.__version__}
    for side in _ours(setup.left, setup.right)[:1]:
        facts = side.model.contract(side.device, side.dtype, side.split)
    facts["dtype"] = ", ".join(dict.fromkeys(map(str, setup.dtypes)))
    facts["python"] = platform.python_version()
    return {key: str(value) for key, value in facts.items()} | _foreign_facts(setup)


def _ours(*passes: ForwardPass) -> list[ForwardPass]:
    """Return the passes over our own network."""
    return [one for one in passes if isinstance(one.model, CausalLM)]


def _foreign_facts(setup: ReplaySetup) -> dict[str, str]:
    """Return what a side that ran elsewhere says of itself."""
    sides = [side for side in (setup.left, setup.right) if isinstance(side, DumpPass)]
    return {
        f"{side.name}: {key}": text for side in sides for key, text in side.dump.metadata.items()
    }


def _verdict(
    setup: ReplaySetup, comparison: Comparison, explanations: Mapping[Point, Explanation]
) -> str:
    first = comparison.first_introduced
    explanation = explanations.get(first.point) if first else None
    lines = [verdict(comparison, setup.case, setup.names, explanation)]
    if first is not None and isinstance(setup.right, RanksPass):
        lines += _of_some_ranks(setup.right, comparison, first)
    if setup.doubt and comparison.agree:
        lines[0] += f" {setup.doubt}"
    if setup.tolerance is not None and comparison.results:
        lines[:0] = tolerance_sentences(comparison, setup.case, setup.tolerance)
    if setup.dtypes[0] != setup.dtypes[1]:
        lines.insert(0, _name_dtypes(setup))
    if setup.limits:
        lines.insert(0, first_line(setup.limits))
    return "\n".join([*lines, *_remarks(setup, comparison)])


def _of_some_ranks(side: RanksPass, comparison: Comparison, first: PointResult) -> Iterator[str]:
    """Yield a sentence if only some of the ranks have what differs."""
    assert comparison.evidence is not None
    ranks = side.ranks_that_differ(first.point, comparison.evidence.patched.table[first.point])
    if 0 < len(ranks) < (count := len(side.shares[first.point])):
        yield f"Of {count} ranks, only these have what differs: {', '.join(map(str, ranks))}."


def _remarks(setup: ReplaySetup, comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the planted fault and the recorded log-probs."""
    if setup.planted and not comparison.results:
        yield f"The planted fault, {setup.planted}, changes nothing here."
    if setup.drew_samples and (recorded := recorded_logprobs(setup, comparison)):
        yield recorded.sentence


def _name_dtypes(setup: ReplaySetup) -> str:
    left_dtype, right_dtype = (str(dtype).removeprefix("torch.") for dtype in setup.dtypes)
    left, right = setup.names
    return f"The {left} computes in {left_dtype}, the {right} in {right_dtype}."


def _explain(
    setup: ReplaySetup, comparison: Comparison, results: Sequence[PointResult]
) -> dict[Point, Explanation]:
    """Return kernels and arithmetic of both sides, for each of `results`."""
    evidence = comparison.evidence
    assert evidence is not None
    left_kernels = kernels_of(setup.left, setup.case)
    right_kernels = kernels_of(setup.right, setup.case)
    left_values, right_values = evidence.patched, evidence.other
    if comparison.patched != setup.left.name:
        left_values, right_values = right_values, left_values
    search = _variant_search(setup, evidence)
    return {
        result.point: Explanation(
            _explain_side(search, result, left_kernels, left_values),
            _explain_side(search, result, right_kernels, right_values),
        )
        for result in results
    }


def _variant_search(setup: ReplaySetup, evidence: PatchEvidence) -> VariantSearch:
    ours = [one.model for one in _ours(setup.right, setup.left)]
    return VariantSearch(
        evidence,
        setup.case,
        setup.network,
        ours[0].spec if ours else read_spec(setup.model),
        max(setup.left.split, setup.right.split),
        ours[0].exponents if ours else None,
    )


def _explain_side(
    search: VariantSearch, result: PointResult, trace: KernelTrace, values: ValueTap
) -> SideExplanation:
    """Return the kernels of the first row that differs, and the arithmetic of all rows."""
    kernels = trace.at(result.point, result.differing_rows[0])
    return SideExplanation(kernels, tuple(search.matches(result.point, values, trace.step_of)))
