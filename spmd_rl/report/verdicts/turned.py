"""Evaluation prompts whose samples turned from wrong to right between two evaluations, or back."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from spmd_rl.observe.jsonl import numbered_lines
from spmd_rl.report.prompt_names import user_text
from spmd_rl.report.samples import sample_row

MAX_EXAMPLES = 5  # of each set and direction
MAX_CHARACTERS = 300  # of a text that the page shows
MIN_CHANGE = 0.5  # of a prompt's mean reward
_FILE = re.compile(r"eval_(.+)_step_(\d+)\.jsonl")


class _GradedSample(msgspec.Struct):
    """The fields of a sample that tell how a prompt did."""

    prompt_uid: int
    prompt: str = ""
    question: str = ""
    answer: str = ""
    text: str = ""
    reward: float | None = None


def turned_prompts(run: Path, *, small: bool = False) -> list[dict[str, Any]]:
    """Return for each set what turned between its first and its last evaluation.

    That are prompts whose mean reward changed by `MIN_CHANGE` or more. With `small` there are
    counts and no examples. Raises: DataError for a damaged file.
    """
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in (run / "samples").glob("eval_*_step_*.jsonl"):
        if match := _FILE.fullmatch(path.name):
            files[match[1]][int(match[2])] = path
    return [
        {"set": name} | _turned(paths, 0 if small else MAX_EXAMPLES)
        for name, paths in sorted(files.items())
        if len(paths) > 1
    ]


def _turned(paths: dict[int, Path], num_examples: int) -> dict[str, Any]:
    first, last = min(paths), max(paths)
    before, after = _read(paths[first]), _read(paths[last])
    changes = {uid: _reward(after[uid]) - _reward(before[uid]) for uid in before if uid in after}
    right = [uid for uid, change in changes.items() if change >= MIN_CHANGE]
    wrong = [uid for uid, change in changes.items() if change <= -MIN_CHANGE]
    return {
        "first": first,
        "last": last,
        "num_prompts": len(changes),
        "num_right": len(right),
        "num_wrong": len(wrong),
        "examples": [
            _example(before[uid][0], after[uid][0], changes[uid])
            for uid in right[:num_examples] + wrong[:num_examples]
        ],
    }


def _example(before: _GradedSample, after: _GradedSample, change: float) -> dict[str, Any]:
    texts = user_text(before.prompt, before.question), before.answer, before.text, after.text
    prompt, answer, first, last = (text[-MAX_CHARACTERS:] for text in texts)
    return {"prompt": prompt, "answer": answer, "before": first, "after": last, "change": change}


def _reward(rows: list[_GradedSample]) -> float:
    return fmean(row.reward or 0.0 for row in rows)


def _read(path: Path) -> dict[int, list[_GradedSample]]:
    """Return the samples that did not fail, by prompt."""
    found: dict[int, list[_GradedSample]] = defaultdict(list)
    for number, line in numbered_lines(path):
        row = sample_row(f"{path}:{number}", line, _GradedSample)
        if row.reward is not None:
            found[row.prompt_uid].append(row)
    return found
