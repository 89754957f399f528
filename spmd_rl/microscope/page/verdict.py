"""Verdict: what a comparison found, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spmd_rl.microscope.diagnose.compare import (
    Comparison,
    PointResult,
    begin_sentence,
    name_in_sentence,
)
from spmd_rl.microscope.diagnose.explain import Explanation, SideExplanation
from spmd_rl.microscope.diagnose.flips import RouteFlip
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.taps.points import OPS

MAX_KERNELS, MAX_VARIANTS = 4, 3  # in a sentence


def verdict(
    comparison: Comparison,
    case: ReplayCase,
    names: tuple[str, str],
    explanation: Explanation | None = None,
) -> str:
    """Return one or a few sentences, each on a line.

    They say where the passes part, by how much, on which kernels, and what comes of it.
    """
    sentences = [*comparison.problems, *_arithmetic(comparison, case, names, explanation)]
    if comparison.flip is not None:
        sentences.append(_flip(comparison.flip, case, names))
    return "\n".join(filter(None, sentences))


def _arithmetic(
    comparison: Comparison,
    case: ReplayCase,
    names: tuple[str, str],
    explanation: Explanation | None,
) -> list[str]:
    first = comparison.first_introduced
    if first is None:
        return [_agreement(comparison, names)]
    name, position = case.locate(first.differing_rows[0])
    sentences = [
        f"{first.point}: {_difference(first)} although both sides have the same input: "
        f"introduced here, first at {name} position {position}."
    ]
    if explanation is not None:
        sentences += _both_sides(names, explanation, first)
    return [*sentences, _elsewhere(comparison, first), _outcome(comparison)]


def _both_sides(names: tuple[str, str], explanation: Explanation, first: PointResult) -> list[str]:
    """Name the kernels and the arithmetic of each side, and say if the arithmetic is the same."""
    left, right = explanation.left, explanation.right
    sentences = [_side(names[0], left, first), _side(names[1], right, first)]
    variant = _only_variant(left, first)
    if variant and variant == _only_variant(right, first):
        sentences.append(
            "Both run the same arithmetic; its bits depend on which rows are computed together."
        )
    return sentences


def _difference(result: PointResult) -> str:
    rows = f"{result.num_introduced_rows:,} of {result.num_rows:,} rows"
    distances = result.same_input
    if not distances.unequal:
        return f"{rows} are of another format, equal when rounded to the coarser"
    return (
        f"{distances.unequal:,} of {distances.total:,} outputs, in {rows}, "
        f"differ by at most {distances.largest:,} ULP"
    )


def _agreement(comparison: Comparison, names: tuple[str, str]) -> str:
    left, right = names
    if any(result.status == "inherited" for result in comparison.results):
        return (
            f"{left} and {right} differ, but no op does on the same input: what was replayed is "
            "not what ran (an op that is not a function of its recorded inputs)."
        )
    if comparison.unequal_points:
        point, rows = comparison.unequal_points[0]
        return (
            f"{left} and {right} parted at {point}, in {rows:,} row{_plural(rows)}, but a second "
            "run did not repeat it: one of them does not give the same bits every time."
        )
    return (
        f"{left} and {right} agree in every bit: {comparison.num_compared_rows:,} rows at "
        f"{len(comparison.points)} points."
    )


def _flip(flip: RouteFlip, case: ReplayCase, names: tuple[str, str]) -> str:
    """Name the first router flip, and say whether numbers differed before it."""
    name, position = case.locate(flip.row)
    only = [sorted(set(one) - set(other)) for one, other in _both_ways(flip)]
    sides = " and ".join(
        f"{_list_experts(experts)} in {name_in_sentence(side)}"
        for side, experts in zip(names, only, strict=True)
    )
    layers = f"{flip.num_layers} layer{_plural(flip.num_layers)}"
    came = (
        "The flip came first: nothing differs before it."
        if flip.parted_at is None
        else f"Numbers came first: the passes part at {flip.parted_at}."
    )
    return (
        f"Router flip: layer {flip.point.layer} sends the token at {name} position {position} to "
        f"{sides}, the first of {flip.num_flips:,} flip{_plural(flip.num_flips)} in {layers}. "
        f"{came}"
    )


def _both_ways(flip: RouteFlip) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(flip.left, flip.right), (flip.right, flip.left)]


def _list_experts(ids: Sequence[int]) -> str:
    return f"expert{_plural(len(ids))} {', '.join(map(str, ids))}"


def _elsewhere(comparison: Comparison, first: PointResult) -> str:
    """Name the other ops that introduce differences, and count the points that inherit them."""
    others = [result for result in comparison.results if result is not first]
    introduced = [result.point.op for result in others if result.status == "introduced"]
    num_inherited = sum(result.status == "inherited" for result in others)
    sentences = []
    if introduced:
        sentences.append(f"Introduced as well: {_list_ops(introduced)}.")
    if num_inherited:
        verb = "inherits" if num_inherited == 1 else "inherit"
        sentences.append(f"{num_inherited} later point{_plural(num_inherited)} only {verb} it.")
    return " ".join(sentences)


def _list_ops(ops: Sequence[str]) -> str:
    """Return text that has each op once, with its number of places."""
    counts = Counter(ops)
    return ", ".join(
        f"{op} ({OPS[op]}) in {count} place{_plural(count)}" for op, count in counts.items()
    )


def _outcome(comparison: Comparison) -> str:
    """Say what becomes of the difference in the log-probs."""
    last = next((result for result in comparison.results if result.point.op == "logprob"), None)
    if last is None:
        return ""
    num_nan = int(comparison.logprobs.nan.sum()) if comparison.logprobs else 0
    if num_nan == last.num_rows:
        return f"All {num_nan:,} log-probs are NaN."
    also = f"; {num_nan:,} {'is' if num_nan == 1 else 'are'} NaN" if num_nan else ""
    if not last.num_unequal_rows:
        return f"None of {last.num_rows:,} log-probs changes{also}."
    return (
        f"{last.num_unequal_rows:,} of {last.num_rows:,} log-probs change, "
        f"by {last.largest_difference:.2g} ({last.as_run.largest:,} ULP) at most{also}."
    )


def _side(name: str, side: SideExplanation, result: PointResult) -> str:
    """Name the kernels of the first row that differs, and the arithmetic of all such rows."""
    kernels = [str(kernel) for kernel in side.kernels[:MAX_KERNELS]]
    if more := len(side.kernels) - len(kernels):
        kernels.append(f"{more} more")
    subject = name_in_sentence(name)
    ran = f"There {subject} ran {'; '.join(kernels)}" if kernels else begin_sentence(subject)
    return f"{ran}: {_only_variant(side, result) or _variants(side, result)}."


def _only_variant(side: SideExplanation, result: PointResult) -> str:
    """Return the arithmetic of every row that differs, if there is one."""
    return next(
        (
            match.description
            for match in side.matches
            if match.num_unequal_rows == result.num_introduced_rows
        ),
        "",
    )


def _variants(side: SideExplanation, result: PointResult) -> str:
    matches = [match for match in side.matches if match.num_unequal_rows]
    matches.sort(key=lambda match: -match.num_unequal_rows)
    matches = matches[:MAX_VARIANTS]
    if not matches:
        return "no arithmetic that was tried gives a row that differs"
    parts = [f"{match.description} in {match.num_unequal_rows:,}" for match in matches]
    num_rows = result.num_introduced_rows
    if num_left := num_rows - sum(match.num_unequal_rows for match in matches):
        parts.append(f"others in {num_left:,}")
    return f"{', '.join(parts)} of the {num_rows:,} rows that differ"


def _plural(count: int) -> str:
    return "" if count == 1 else "s"
