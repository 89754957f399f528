"""Data of a report: an examination as plain data, which is the JSON and fills the page."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from spmd_rl.microscope.diagnose.compare import Comparison, PointResult
from spmd_rl.microscope.diagnose.explain import Explanation, SideExplanation
from spmd_rl.microscope.diagnose.faults import FAULTS
from spmd_rl.microscope.diagnose.ulp import Histogram
from spmd_rl.microscope.examine import (
    Examination,
    RecordedLogprobs,
    ReplaySetup,
    recorded_logprobs,
    versions,
)
from spmd_rl.microscope.page.html_page import render
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.taps.points import Point
from spmd_rl.observe.atomic_write import write_atomically

MAX_CHARACTERS, MAX_KERNELS = 200, 12  # characters of a text, kernels of an op


def write_report(examination: Examination, folder: Path) -> Path:
    """Write the page and the JSON, and return the path of the page.

    A folder has one of each for a pair of passes and a planted fault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    setup, data = examination.setup, as_data(examination)
    name = "-".join(setup.names).replace(" ", "-") + (f".{setup.planted}" if setup.planted else "")
    write_atomically(folder / f"{name}.json", _as_json(data))
    write_atomically(folder / f"{name}.html", render(data))
    return folder / f"{name}.html"


def as_data(examination: Examination) -> dict[str, Any]:
    """Return the whole examination as plain data."""
    setup, comparison = examination.setup, examination.comparison
    first = comparison.first_introduced
    return {
        "verdict": examination.verdict,
        "agree": examination.agree,
        "tolerance": setup.tolerance,
        "troubles": list(comparison.problems),
        **_setup_data(setup),
        "fed": comparison.patched,
        "recorded": _recorded(recorded_logprobs(setup, comparison)),
        "points": len(comparison.points),
        "compared_rows": comparison.num_compared_rows,
        "first": None if first is None else _point_result(first, setup.case),
        "unequal_logprobs": _unequal_logprobs(comparison, setup.case),
        "findings": [_point_result(result, setup.case) for result in comparison.results],
        "causes": [_cause(*item) for item in examination.explanations.items()],
    }


def _setup_data(setup: ReplaySetup) -> dict[str, Any]:
    return {
        "notes": list(setup.notes),
        "limits": list(setup.limits),
        "run": setup.run,
        "command": setup.command,
        "left": setup.left.name,
        "right": setup.right.name,
        "planted": setup.planted and f"{setup.planted}: {FAULTS[setup.planted].__doc__}",
        "weights": setup.weights or setup.model,
        "versions": versions(setup),
        "sequences": [_sequence(sequence, setup.case) for sequence in setup.case.sequences],
        "facts": {setup.left.name: setup.left.facts, setup.right.name: setup.right.facts},
    }


def _recorded(recorded: RecordedLogprobs | None) -> dict[str, Any] | None:
    if recorded is None:
        return None
    return {
        "equal": recorded.num_equal,
        "of": recorded.num_recorded,
        "says": recorded.sentence,
    }


def _as_json(data: dict[str, Any]) -> str:
    """Return JSON with a line for each value, and for each entry of a list."""
    dump = partial(json.dumps, allow_nan=False, ensure_ascii=False)
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
        else:
            text = dump(value)
        lines.append(f" {dump(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _sequence(sequence: ReplaySequence, case: ReplayCase) -> dict[str, Any]:
    return {
        "name": sequence.name,
        "prompt_tokens": len(sequence.prompt),
        "response_tokens": len(sequence.response),
        "prompt": _shorten(case.text(sequence.prompt.tolist())),
        "response": _shorten(case.text(sequence.response.tolist())),
    }


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def _unequal_logprobs(comparison: Comparison, case: ReplayCase) -> list[dict[str, Any]]:
    """Return the tokens whose log-probs differ.

    A position is that of the row that predicts the token, as everywhere.
    """
    logprobs = comparison.logprobs
    if logprobs is None:
        return []
    columns = (logprobs.rows, logprobs.left, logprobs.right)
    rows, left, right = (column[logprobs.unequal].tolist() for column in columns)
    return [_token(case, *one) for one in zip(rows, left, right, strict=True)]


def _token(case: ReplayCase, row: int, left: float, right: float) -> dict[str, Any]:
    (name, position), token = case.locate(row), int(case.targets[row])
    prompt_length = len(case.sequences[case.sequence_number(row)].prompt)
    return {
        "sequence": name,
        "position": position,
        "response_token": position + 1 - prompt_length,
        "token": token,
        "text": case.text([token]),
        "left": _finite(left),
        "right": _finite(right),
        "recorded": _finite(float(case.recorded[row])),
    }


def _finite(x: float) -> float | None:
    """Return `x`, or None if it is NaN or infinite, which JSON does not have."""
    return x if math.isfinite(x) else None


def _cause(point: Point, explanation: Explanation) -> dict[str, Any]:
    return {
        "layer": point.layer,
        "op": point.op,
        "left": _side(explanation.left),
        "right": _side(explanation.right),
    }


def _side(side: SideExplanation) -> dict[str, list[str]]:
    kernels = [str(kernel) for kernel in side.kernels[:MAX_KERNELS]]
    if len(side.kernels) > MAX_KERNELS:
        kernels.append(f"and {len(side.kernels) - MAX_KERNELS} more")
    arithmetic = [f"{match.description}: {match.num_rows} rows" for match in side.matches]
    return {"kernels": kernels, "arithmetic": arithmetic}


def _point_result(result: PointResult, case: ReplayCase) -> dict[str, Any]:
    positions: dict[str, list[int]] = {}
    for row in result.differing_rows:
        name, position = case.locate(row)
        positions.setdefault(name, []).append(position)
    return {
        "layer": result.point.layer,
        "op": result.point.op,
        "status": result.status,
        "rows": result.num_rows,
        "unequal_rows": result.num_unequal_rows,
        "introduced_rows": result.num_introduced_rows,
        "largest_difference": _finite(result.largest_difference),
        "largest_share": _finite(result.largest_share),
        "plain": _histogram(result.as_run),
        "on_same_input": _histogram(result.same_input),
        "positions": positions,
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"largest_ulp": histogram.largest, "counts": list(histogram.counts)}
