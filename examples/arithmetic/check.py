"""Checks what a demo run left behind, figure by figure. Ends with 1 when one misses its bar.

python -m examples.arithmetic.check runs/demo -- make demo

runs the command first and also checks the time that it took. That is processor time, because a busy
machine slows the clock. The clock has bars too, but they are ten times as high as what an idle
machine with two cores must reach.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.observe.metrics_log import read_metrics

HERE = Path(__file__).parent
LAST = 5  # steps that the final reward is the mean of


@dataclass(frozen=True)
class Figure:
    """One measured value beside its bar. `bar` reads as in `>= 0.9`."""

    what: str
    value: float
    bar: str

    @property
    def holds(self) -> bool:
        sign, limit = self.bar.split()
        return {"<=": self.value <= float(limit), ">=": self.value >= float(limit)}[sign]


def learning(rows: list[dict[str, Any]]) -> Iterator[Figure]:
    """Reward and bitwise agreement, from the lines of metrics.jsonl."""
    rewards = [row["reward/mean"] for row in rows]
    missing = sum(row.get("onpolicy/mismatched_tokens") is None for row in rows)
    yield Figure("reward of the first step", rewards[0], "<= 0.5")
    yield Figure(
        f"mean reward of the last {LAST} steps",
        sum(rewards[-LAST:]) / len(rewards[-LAST:]),
        ">= 0.9",
    )
    yield Figure("steps without a count of mismatched tokens", missing, "<= 0")
    yield Figure(
        "mismatched tokens", sum(row.get("onpolicy/mismatched_tokens") or 0 for row in rows), "<= 0"
    )


def times(rows: list[dict[str, Any]], started: float, cpu_s: float) -> Iterator[Figure]:
    """What the command took: processor seconds, and seconds since its launch at the unix time
    `started`.
    """
    yield Figure("processor seconds", cpu_s, "<= 180")
    yield Figure("seconds to the first reward", rows[0]["unix_s"] - started, "<= 200")
    yield Figure("seconds to the last step", rows[-1]["unix_s"] - started, "<= 1800")


def files(run: Path, num_steps: int) -> Iterator[Figure]:
    """What must lie in the folder beside the metrics."""
    yield Figure("bytes of curves.png", _size(run / "curves.png"), ">= 10000")
    yield Figure(
        "steps with samples", len(list((run / "samples").glob("step_*.jsonl"))), f">= {num_steps}"
    )


def exported(folder: Path, questions: list[dict[str, str]]) -> Iterator[Figure]:
    """The exported model, loaded by transformers alone, on prompts that it was never trained on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer(
        [question["prompt"] for question in questions], return_tensors="pt", padding=True
    )
    asked.pop("token_type_ids", None)
    said = model.generate(**asked, max_new_tokens=8, do_sample=False)[
        :, asked["input_ids"].shape[1] :
    ]
    answers = tokenizer.batch_decode(said, skip_special_tokens=True)
    right = sum(
        answer == question["answer"] for answer, question in zip(answers, questions, strict=True)
    )
    yield Figure(
        "held-out prompts answered by the exported model", right / len(questions), ">= 0.8"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cpu_s_of_children() -> float:
    """Of all descendants that somebody waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--questions", type=Path, default=HERE / "eval.jsonl")
    parser.add_argument("command", nargs="*", help="makes the run; without it no times are checked")
    args = parser.parse_args()

    started = time.time()
    if args.command:
        subprocess.run(args.command, check=True)
    cpu_s = _cpu_s_of_children()
    rows = [row for row in read_metrics(args.run / "metrics.jsonl") if row["step"] > 0]
    if not rows:
        print(f"{args.run} holds no metrics", file=sys.stderr)
        return 1
    questions = [
        json.loads(line) for line in args.questions.read_text(encoding="utf-8").splitlines()
    ]
    figures = [*learning(rows), *files(args.run, len(rows)), *exported(args.run / "hf", questions)]
    if args.command:
        figures += times(rows, started, cpu_s)
    for figure in figures:
        mark = "ok  " if figure.holds else "FAIL"
        print(f"{mark}  {figure.what}: {figure.value:,.3f} (bar {figure.bar})")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
