"""What a comparison says, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.microscope.case import Case
from spmd_rl.microscope.compare import Comparison, Finding
from spmd_rl.microscope.identity import Kernel
from spmd_rl.microscope.points import OPS

Pair = tuple[Sequence[Kernel], Sequence[Kernel]]


def verdict(comparison: Comparison, case: Case, names: tuple[str, str], kernels: Pair | None = None) -> str:
    """One or a few sentences: where the paths part, by how much, on what kernels, and what comes of it."""
    first = comparison.first
    if first is None:
        return _agreement(comparison, names)
    name, position = case.where(first.rows[0])
    sentences = [
        f"{first.point}: {_share(first.fed.unequal, first.fed.total, 'output')} of {first.introduced_rows} "
        f"row{_s(first.introduced_rows)} differ by at most {first.fed.largest:,} ULP although both sides have the same "
        f"input: introduced here, first at {name} position {position}."
    ]
    if kernels is not None:
        sentences.append(_kernels(names, kernels))
    sentences.append(_elsewhere(comparison, first))
    return " ".join(filter(None, [*sentences, _outcome(comparison)]))


def _agreement(comparison: Comparison, names: tuple[str, str]) -> str:
    if any(one.status == "inherited" for one in comparison.findings):
        return (
            f"{names[0]} and {names[1]} differ, but no op does on the same input: what was replayed is not what ran "
            "(an op that is not a function of its recorded inputs)."
        )
    return (
        f"{names[0]} and {names[1]} agree in every bit: {comparison.num_compared_rows:,} rows at "
        f"{len(comparison.points)} points."
    )


def _elsewhere(comparison: Comparison, first: Finding) -> str:
    """The other ops that introduce differences, by kind, and how many only inherit."""
    introduced = [one for one in comparison.findings if one.status == "introduced" and one is not first]
    inherited = sum(one.status == "inherited" for one in comparison.findings)
    parts = []
    if introduced:
        kinds = dict.fromkeys(one.point.op for one in introduced)
        counts = [(kind, sum(one.point.op == kind for one in introduced)) for kind in kinds]
        named = ", ".join(f"{kind} ({OPS[kind]}) in {count} place{_s(count)}" for kind, count in counts)
        parts.append(f"Introduced as well: {named}.")
    if inherited:
        parts.append(f"{inherited} later point{_s(inherited)} only inherit{_s(inherited, 's')} it.")
    return " ".join(parts)


def _outcome(comparison: Comparison) -> str:
    last = next((one for one in comparison.findings if one.point.op == "logprob"), None)
    if last is None:
        return ""
    if not last.unequal_rows:
        return f"None of {last.num_rows:,} log-probs changes."
    return (
        f"{last.unequal_rows:,} of {last.num_rows:,} log-probs change, by {last.largest_difference:.2g} "
        f"({last.plain.largest:,} ULP) at most."
    )


def _kernels(names: tuple[str, str], kernels: Pair) -> str:
    said = [f"{name} ran {'; '.join(map(str, ran[:2]))}" for name, ran in zip(names, kernels, strict=True) if ran]
    return f"{', '.join(said)}." if said else ""


def _share(part: int, whole: int, what: str) -> str:
    return f"{part:,} of {whole:,} {what}s"


def _s(count: int, singular: str = "") -> str:
    """The plural's ending, or `singular` where there is one."""
    return singular if count == 1 else "" if singular else "s"
