"""From a replay to what it shows, and to the files that keep it: a page and a JSON, named by what
was compared.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as Folder
from typing import Any

import torch

from spmd_rl.microscope.diagnose.compare import Comparison, Finding, compare
from spmd_rl.microscope.diagnose.explain import Trial
from spmd_rl.microscope.diagnose.faults import FAULTS
from spmd_rl.microscope.diagnose.kernel_identity import kernels_of
from spmd_rl.microscope.diagnose.ulp import Histogram
from spmd_rl.microscope.page.html import render
from spmd_rl.microscope.page.verdict import Cause, Side, verdict
from spmd_rl.microscope.replay.case import Case, Replayed
from spmd_rl.microscope.replay.forward_pass import Path
from spmd_rl.microscope.taps.points import Point
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.observe.atomic_write import write_atomically

MAX_TEXT, MAX_KERNELS = 200, 12  # letters of a text, kernels of an op


@dataclass(frozen=True)
class Replay:
    """What is compared, and on what; `drew`: under the weights that drew the samples.

    `weights` says what weights they are, `notes` are sentences on what is replayed, `doubt` is said
    where all agree.
    """

    case: Case
    left: Path
    right: Path
    model: str
    planted: str | None = None
    weights: str = ""
    drew: bool = False
    command: str = ""
    run: str = ""
    notes: tuple[str, ...] = ()
    doubt: str = ""

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
            "agree": comparison.agree,
            "troubles": list(comparison.troubles),
            "notes": list(replay.notes),
            "run": replay.run,
            "command": replay.command,
            "left": replay.left.name,
            "right": replay.right.name,
            "fed": comparison.fed,
            "planted": replay.planted and f"{replay.planted}: {FAULTS[replay.planted].__doc__}",
            "weights": replay.weights or replay.model,
            "versions": versions(replay),
            "sequences": [_sequence(one, replay.case) for one in replay.case.sequences],
            "recorded": recorded(replay, comparison),
            "facts": {replay.left.name: replay.left.facts, replay.right.name: replay.right.facts},
            "points": len(comparison.points),
            "compared_rows": comparison.num_compared_rows,
            "first": None if first is None else _point(first, replay.case),
            "unequal_logprobs": _unequal(comparison, replay.case),
            "findings": [_point(one, replay.case) for one in comparison.findings],
            "causes": [
                {
                    "layer": point.layer,
                    "op": point.op,
                    "left": _side(cause.left),
                    "right": _side(cause.right),
                }
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
    causes = (
        _causes(replay, comparison, list(first_of_kind.values())) if first_of_kind and alike else {}
    )
    first = comparison.first
    cause = causes.get(first.point) if first else None
    said = verdict(comparison, replay.case, replay.names, cause)
    if not alike:
        (left, right), (ours, theirs) = replay.names, replay.dtypes
        said = f"The {left} computes in {_short(ours)}, the {right} in {_short(theirs)}.\n{said}"
    if replay.planted and not comparison.findings:
        said += f"\nThe planted fault, {replay.planted}, changes nothing here."
    if replay.drew and (again := recorded(replay, comparison)):
        said += f"\n{again['says']}"
    if replay.doubt and comparison.agree:
        said += f"\n{replay.doubt}"
    return Examined(replay, comparison, causes, said)


def write(examined: Examined, folder: Folder) -> Folder:
    """Write the page and the JSON, one of each for a pair of paths and a planted fault; where the
    page is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replay, data = examined.replay, examined.as_data()
    name = "-".join(replay.names) + (f".{replay.planted}" if replay.planted else "")
    write_atomically(folder / f"{name}.json", _as_json(data))
    write_atomically(folder / f"{name}.html", render(data))
    return folder / f"{name}.html"


def recorded(replay: Replay, comparison: Comparison) -> dict[str, Any] | None:
    """How many of the log-probs that were kept with the samples the engine gives again; None where
    there are none.
    """
    given = comparison.logprobs
    if given is None or "engine" not in replay.names:
        return None
    kept = torch.from_numpy(replay.case.recorded)[given.rows]
    known = ~kept.isnan()
    again = (given.left, given.right)[replay.names.index("engine")] == kept
    equal, count = int(again[known].sum()), int(known.sum())
    only = "" if replay.drew else "; it says something only under the weights that drew them"
    says = f"Of the {count:,} log-probs recorded with the samples, the engine gives {equal:,} again{only}."
    return {"equal": equal, "of": count, "says": says} if count else None


def versions(replay: Replay) -> dict[str, str]:
    """What the bits may depend on: the numeric contract's facts, and the libraries' versions."""
    ours = next(path for path in (replay.left, replay.right) if isinstance(path.model, CausalLM))
    parameter = next(ours.model.parameters())
    facts = ours.model.contract(parameter.device, parameter.dtype, ours.split)
    facts["dtype"] = ", ".join(dict.fromkeys(map(str, replay.dtypes)))
    return {key: str(value) for key, value in facts.items()} | {"python": platform.python_version()}


def _causes(
    replay: Replay, comparison: Comparison, findings: Sequence[Finding]
) -> dict[Point, Cause]:
    """Kernels and arithmetic of both sides, for each of `findings`."""
    evidence = comparison.evidence
    assert evidence is not None
    kernels = kernels_of(replay.left, replay.case), kernels_of(replay.right, replay.case)
    outputs = (evidence.fed, evidence.other)
    outputs = outputs if comparison.fed == replay.left.name else outputs[::-1]
    spec = ModelSpec.from_folder(replay.model)
    trial = Trial(
        evidence, replay.case, replay.right.model, spec, max(replay.left.split, replay.right.split)
    )
    return {
        one.point: Cause(
            *(
                Side(
                    ran.at(one.point, one.rows[0]),
                    tuple(trial.matches(one.point, values, ran.step_of)),
                )
                for ran, values in zip(kernels, outputs, strict=True)
            )
        )
        for one in findings
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(data: dict[str, Any]) -> str:
    """A line for each value, and for each entry of a list."""
    dump = partial(json.dumps, allow_nan=False, ensure_ascii=False)
    values = {
        key: "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
        if isinstance(value, list) and value
        else dump(value)
        for key, value in data.items()
    }
    return "{\n" + ",\n".join(f" {dump(key)}: {text}" for key, text in values.items()) + "\n}\n"


def _sequence(one: Replayed, case: Case) -> dict[str, Any]:
    texts = (case.text(tokens.tolist()) for tokens in (one.prompt, one.response))
    prompt, response = (text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…" for text in texts)
    return {
        "name": one.name,
        "prompt_tokens": len(one.prompt),
        "response_tokens": len(one.response),
        "prompt": prompt,
        "response": response,
    }


def _unequal(comparison: Comparison, case: Case) -> list[dict[str, Any]]:
    """The tokens whose log-probs differ: `position` is that of the row that predicts the token, as
    everywhere.
    """
    given = comparison.logprobs
    if given is None:
        return []
    at = given.unequal
    rows, left, right = given.rows[at].tolist(), given.left[at].tolist(), given.right[at].tolist()
    return [_token(case, *one) for one in zip(rows, left, right, strict=True)]


def _token(case: Case, row: int, left: float, right: float) -> dict[str, Any]:
    (name, position), token = case.where(row), int(case.targets[row])
    return {
        "sequence": name,
        "position": position,
        "response_token": position + 1 - len(case.sequences[case.number(row)].prompt),
        "token": token,
        "text": case.text([token]),
        "left": _number(left),
        "right": _number(right),
        "recorded": _number(float(case.recorded[row])),
    }


def _number(x: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return x if math.isfinite(x) else None


def _side(side: Side) -> dict[str, list[str]]:
    more = len(side.kernels) - MAX_KERNELS
    return {
        "kernels": [
            *map(str, side.kernels[:MAX_KERNELS]),
            *([f"and {more} more"] if more > 0 else []),
        ],
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
        "largest_difference": _number(one.largest_difference),
        "plain": _histogram(one.plain),
        "on_same_input": _histogram(one.fed),
        "positions": rows,
    }


def _histogram(one: Histogram) -> dict[str, Any]:
    return {"largest_ulp": one.largest, "counts": list(one.counts)}
