"""When a run evaluates, and the names of its sets, whatever is evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spmd_rl.config.combinations import ON, Combination, refuse
from spmd_rl.config.rules import at_least, require
from spmd_rl.observe.metrics_log import read_metrics

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SLICE = re.compile(r"@\[[^]]*\]$")


REFUSED = (
    Combination(
        {"data": ON, "sets": ON},
        "{0.key} and {1.key} cannot both be given: put data into a set of its own",
    ),
)


@dataclass(frozen=True)
class EvalSettings:
    """When a run evaluates, and on which sets. Without a set, it never does."""

    every: int = 0  # steps between evaluations; 0: none between the first and the last
    before: bool = True  # evaluate before the first step
    at_end: bool = True  # evaluate after the last step
    data: str = ""  # file of a single set, whose name is that of the file
    sets: Mapping[str, Any] = field(default_factory=dict)  # several sets by their names

    def __post_init__(self) -> None:
        at_least(self, {"every": 0})
        refuse(REFUSED, self)
        for name in self.sets:
            require(
                _NAME.fullmatch(name) is not None,
                "name of a set",
                name,
                "letters, digits, and any of _ . - after the first",
            )


class EvalSchedule:
    """Says which evaluations of a run are due, and not recorded yet.

    The run begins after `first` steps and ends after `num_steps`, or earlier.
    """

    def __init__(
        self, settings: EvalSettings, run_folder: Path, num_steps: int, first: int = 0
    ) -> None:
        self.num_steps = num_steps
        self._settings = settings
        self._first = first
        self._metrics = run_folder / "metrics.jsonl"

    def is_planned(self, num_steps: int) -> bool:
        """Return whether an evaluation belongs to the start of the step after `num_steps` steps."""
        return self._settings.before if num_steps == self._first else self._is_periodic(num_steps)

    def is_due(self, num_steps: int) -> bool:
        """Return whether such an evaluation is planned, and not recorded yet."""
        return self.is_planned(num_steps) and num_steps not in self._recorded

    def is_due_at_end(self, num_steps: int) -> bool:
        """Return whether an evaluation is due after the last step, the step `num_steps`."""
        due = self._settings.at_end or self._is_periodic(num_steps)
        return num_steps > self._first and due and num_steps not in self._recorded

    def _is_periodic(self, num_steps: int) -> bool:
        return self._settings.every > 0 and num_steps % self._settings.every == 0

    @cached_property
    def _recorded(self) -> set[int]:
        """The steps whose evaluation was recorded before this start of the run.

        It is read in the loop, where the lines that a resumed run writes again are gone.
        """
        rows = read_metrics(self._metrics)
        return {row["step"] for row in rows if any(name.startswith("eval/") for name in row)}


def name_of_file(data: str) -> str:
    """Return the name of the set in a file, from that of the file."""
    stem = Path(_SLICE.sub("", data)).stem
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("_.-") or "eval"
