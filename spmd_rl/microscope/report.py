"""From a replay to what it shows, and to the files that keep it: mismatch.html and mismatch.json."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import torch

from spmd_rl.microscope.case import Case
from spmd_rl.microscope.compare import Comparison, Finding, compare
from spmd_rl.microscope.explain import Trial
from spmd_rl.microscope.faults import FAULTS
from spmd_rl.microscope.identity import kernels_of
from spmd_rl.microscope.page import render
from spmd_rl.microscope.paths import Path
from spmd_rl.microscope.points import Point
from spmd_rl.microscope.ulp import Histogram
from spmd_rl.microscope.verdict import Cause, Side, verdict
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.observe.run import write_whole


@dataclass(frozen=True)
class Replay:
    """What is compared, and on what."""

    case: Case
    left: Path
    right: Path
    model: str
    planted: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        return self.left.name, self.right.name

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        left, right = (next(path.model.parameters()).dtype for path in (self.left, self.right))
        return left, right


@dataclass(frozen=True)
class Examined:
    """`causes` are known for the first point of each kind of op that introduces a difference."""

    replay: Replay
    comparison: Comparison
    causes: Mapping[Point, Cause]
    verdict: str

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data, for the JSON and the page."""
        replay, comparison = self.replay, self.comparison
        first = comparison.first
        return {
            "verdict": self.verdict,
            "agree": not comparison.findings,
            "left": replay.left.name,
            "right": replay.right.name,
            "fed": comparison.fed,
            "planted": replay.planted and f"{replay.planted}: {FAULTS[replay.planted].__doc__}",
            "model": replay.model,
            "versions": versions(replay),
            "sequences": [
                {"name": one.name, "prompt_tokens": len(one.prompt), "response_tokens": len(one.response)}
                for one in replay.case.sequences
            ],
            "facts": {replay.left.name: replay.left.facts, replay.right.name: replay.right.facts},
            "points": len(comparison.points),
            "compared_rows": comparison.num_compared_rows,
            "first": None if first is None else _point(first, replay.case),
            "findings": [_point(one, replay.case) for one in comparison.findings],
            "causes": [
                {"layer": point.layer, "op": point.op, "left": _side(cause.left), "right": _side(cause.right)}
                for point, cause in self.causes.items()
            ],
        }


def examine(replay: Replay) -> Examined:
    """Compare the two paths and, where they part in the same type of numbers, look up the kernels."""
    comparison = compare(replay.left, replay.right, replay.case)
    first_of_kind: dict[str, Finding] = {}
    for one in comparison.findings:
        if one.status == "introduced":
            first_of_kind.setdefault(one.point.op, one)
    alike = replay.dtypes[0] == replay.dtypes[1]
    causes = _causes(replay, comparison, list(first_of_kind.values())) if first_of_kind and alike else {}
    first = comparison.first
    cause = causes.get(first.point) if first else None
    said = verdict(comparison, replay.case, replay.names, cause)
    if not alike:
        (left, right), (ours, theirs) = replay.names, replay.dtypes
        said = (
            f"The {left} computes in {_short(ours)}, the {right} in {_short(theirs)}: no op has the same bits.\n{said}"
        )
    if replay.planted and not comparison.findings:
        said += f"\nThe planted fault, {replay.planted}, changes nothing here."
    return Examined(replay, comparison, causes, said)


def write(examined: Examined, folder: Folder) -> Folder:
    """Write the page and the JSON; where the page is."""
    folder.mkdir(parents=True, exist_ok=True)
    data = examined.as_data()
    write_whole(folder / "mismatch.json", json.dumps(data, indent=1) + "\n")
    write_whole(folder / "mismatch.html", render(data))
    return folder / "mismatch.html"


def versions(replay: Replay) -> dict[str, str]:
    """What the bits may depend on: the numeric contract's facts, and the libraries' versions."""
    ours = next(path for path in (replay.left, replay.right) if isinstance(path.model, CausalLM))
    parameter = next(ours.model.parameters())
    facts = ours.model.contract(parameter.device, parameter.dtype, ours.split)
    facts["dtype"] = ", ".join(dict.fromkeys(map(str, replay.dtypes)))
    return {key: str(value) for key, value in facts.items()} | {"python": platform.python_version()}


def _causes(replay: Replay, comparison: Comparison, findings: Sequence[Finding]) -> dict[Point, Cause]:
    """Kernels and arithmetic of both sides, for each of `findings`."""
    evidence = comparison.evidence
    assert evidence is not None
    kernels = kernels_of(replay.left, replay.case), kernels_of(replay.right, replay.case)
    outputs = (evidence.fed, evidence.other)
    outputs = outputs if comparison.fed == replay.left.name else outputs[::-1]
    spec = ModelSpec.from_folder(replay.model)
    trial = Trial(evidence, replay.case, replay.right.model, spec, max(replay.left.split, replay.right.split))
    return {
        one.point: Cause(
            *(
                Side(ran.at(one.point, one.rows[0]), tuple(trial.matches(one.point, values, ran.step_of)))
                for ran, values in zip(kernels, outputs, strict=True)
            )
        )
        for one in findings
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _side(side: Side) -> dict[str, list[str]]:
    return {
        "kernels": [str(kernel) for kernel in side.kernels],
        "arithmetic": [f"{match.says}: {match.rows} rows" for match in side.matches],
    }


def _point(one: Finding, case: Case) -> dict[str, Any]:
    rows: dict[str, list[int]] = {}
    for row in one.rows:
        name, position = case.where(row)
        rows.setdefault(name, []).append(position)
    return {
        "layer": one.point.layer,
        "op": one.point.op,
        "status": one.status,
        "rows": one.num_rows,
        "unequal_rows": one.unequal_rows,
        "introduced_rows": one.introduced_rows,
        "largest_difference": one.largest_difference,
        "plain": _histogram(one.plain),
        "on_same_input": _histogram(one.fed),
        "positions": rows,
    }


def _histogram(one: Histogram) -> dict[str, Any]:
    return {"largest_ulp": one.largest, "counts": list(one.counts)}
