"""What a comparison says, in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.microscope.diagnose.compare import Comparison, Finding, the
from spmd_rl.microscope.diagnose.explain import Match
from spmd_rl.microscope.diagnose.kernel_identity import Kernel
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.taps.points import OPS

MAX_KERNELS, MAX_WAYS = 4, 3  # in a sentence


@dataclass(frozen=True)
class Side:
    """What one path ran for an op, and the arithmetic that its bits are those of."""

    kernels: tuple[Kernel, ...]
    matches: tuple[Match, ...]


@dataclass(frozen=True)
class Cause:
    left: Side
    right: Side


def verdict(
    comparison: Comparison, case: Case, names: tuple[str, str], cause: Cause | None = None
) -> str:
    """One or a few sentences, each a line: where the paths part, by how much, on what kernels, and
    what comes of it.
    """
    return "\n".join(
        filter(None, [*comparison.troubles, *_arithmetic(comparison, case, names, cause)])
    )


def _arithmetic(
    comparison: Comparison, case: Case, names: tuple[str, str], cause: Cause | None
) -> list[str]:
    first = comparison.first
    if first is None:
        return [_agreement(comparison, names)]
    name, position = case.where(first.rows[0])
    rows = f"{first.introduced_rows:,} of {first.num_rows:,} rows"
    outputs = f"{first.fed.unequal:,} of {first.fed.total:,} outputs"
    apart = f"{outputs}, in {rows}, differ by at most {first.fed.largest:,} ULP"
    if not first.fed.unequal:
        apart = f"{rows} are of another format, equal when rounded to the coarser"
    sentences = [
        f"{first.point}: {apart} although both sides have the same input: introduced here, first at {name} position "
        f"{position}."
    ]
    if cause is not None:
        sentences += [_side(names[0], cause.left, first), _side(names[1], cause.right, first)]
        if (way := _one_way(cause.left, first)) and way == _one_way(cause.right, first):
            sentences.append(
                "Both run the same arithmetic; its bits depend on which rows are computed together."
            )
    return [*sentences, _elsewhere(comparison, first), _outcome(comparison)]


def _agreement(comparison: Comparison, names: tuple[str, str]) -> str:
    if any(one.status == "inherited" for one in comparison.findings):
        return (
            f"{names[0]} and {names[1]} differ, but no op does on the same input: what was replayed is not what ran "
            "(an op that is not a function of its recorded inputs)."
        )
    if comparison.parted:
        point, rows = comparison.parted[0]
        return (
            f"{names[0]} and {names[1]} parted at {point}, in {rows:,} row{_s(rows)}, but a second run did not repeat "
            "it: one of them does not give the same bits every time."
        )
    return (
        f"{names[0]} and {names[1]} agree in every bit: {comparison.num_compared_rows:,} rows at "
        f"{len(comparison.points)} points."
    )


def _elsewhere(comparison: Comparison, first: Finding) -> str:
    """The other ops that introduce differences, by kind, and how many only inherit."""
    introduced = [
        one for one in comparison.findings if one.status == "introduced" and one is not first
    ]
    inherited = sum(one.status == "inherited" for one in comparison.findings)
    parts = []
    if introduced:
        kinds = dict.fromkeys(one.point.op for one in introduced)
        counts = [(kind, sum(one.point.op == kind for one in introduced)) for kind in kinds]
        named = ", ".join(
            f"{kind} ({OPS[kind]}) in {count} place{_s(count)}" for kind, count in counts
        )
        parts.append(f"Introduced as well: {named}.")
    if inherited:
        parts.append(f"{inherited} later point{_s(inherited)} only inherit{_s(inherited, 's')} it.")
    return " ".join(parts)


def _outcome(comparison: Comparison) -> str:
    last = next((one for one in comparison.findings if one.point.op == "logprob"), None)
    if last is None:
        return ""
    nan = int(comparison.logprobs.nan.sum()) if comparison.logprobs else 0
    if nan == last.num_rows:
        return f"All {nan:,} log-probs are NaN."
    also = f"; {nan:,} {'is' if nan == 1 else 'are'} NaN" if nan else ""
    if not last.unequal_rows:
        return f"None of {last.num_rows:,} log-probs changes{also}."
    return (
        f"{last.unequal_rows:,} of {last.num_rows:,} log-probs change, by {last.largest_difference:.2g} "
        f"({last.plain.largest:,} ULP) at most{also}."
    )


def _side(name: str, side: Side, finding: Finding) -> str:
    """Kernels are those of the first row that differs, the arithmetic that of all such rows."""
    kernels = [*map(str, side.kernels[:MAX_KERNELS])]
    if more := len(side.kernels) - len(kernels):
        kernels.append(f"{more} more")
    ran = f"There {the(name)} ran {'; '.join(kernels)}" if kernels else the(name).capitalize()
    return f"{ran}: {_one_way(side, finding) or _ways(side, finding)}."


def _one_way(side: Side, finding: Finding) -> str:
    """The arithmetic of every row that differs, if there is one."""
    return next(
        (match.says for match in side.matches if match.unequal == finding.introduced_rows), ""
    )


def _ways(side: Side, finding: Finding) -> str:
    matches = sorted(
        (match for match in side.matches if match.unequal), key=lambda match: -match.unequal
    )
    ways = [f"{match.says} in {match.unequal:,}" for match in matches[:MAX_WAYS]]
    if ways and (
        left := finding.introduced_rows - sum(match.unequal for match in matches[:MAX_WAYS])
    ):
        ways.append(f"others in {left:,}")
    if not ways:
        return "no arithmetic that was tried gives a row that differs"
    return f"{', '.join(ways)} of the {finding.introduced_rows:,} rows that differ"


def _s(count: int, singular: str = "") -> str:
    """The plural's ending, or `singular` where there is one."""
    return singular if count == 1 else "" if singular else "s"
