"""Ledger of memory: the bytes of every tag on one rank, and the phases in which they are resident.

A role says what it takes as `TagBytes`. The plan turns these into entries, whose phases follow from
the recipe's declaration (phases.py) and from what sleeps. It is computed without a GPU. A plan that
cannot fit is refused before anything starts, with the sum that shows why.

Units: bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from spmd_rl.errors import PlanError

UNITS = ("KiB", "MiB", "GiB")
THREE_DIGITS = 999.5  # below it, a number rounds to at most three digits before the point
MIB = 1 << 20


@dataclass(frozen=True)
class TagBytes:
    """Memory of a role on one of its ranks, under one tag.

    Of what can sleep, "save" says that the bytes are copied to host memory, and "drop" that they
    are not. "fixed" never sleeps. "work" exists only while the role computes.
    """

    tag: str
    num_bytes: int
    kind: Literal["save", "drop", "fixed", "work"]
    host_bytes: int = 0  # in host memory, all the time
    # whether each step changes the bytes; else they are saved once, and later only copied back
    changes: bool = True
    # whether they are off the GPU at the point where the role's work takes most
    is_away_in_work: bool = False


@dataclass(frozen=True)
class Entry:
    """Bytes under one tag, resident in the given phases (None: in all).

    The work of several roles on a rank is done in turn, so a phase has that of one role at a time.
    """

    tag: str
    num_bytes: int
    phases: tuple[str, ...] | None = None
    role: str = ""
    is_work: bool = False
    host_bytes: int = 0

    def is_in(self, phase: str) -> bool:
        return self.phases is None or phase in self.phases


@dataclass(frozen=True)
class Ledger:
    """All entries of one rank, and the run's phases in their order."""

    entries: tuple[Entry, ...]
    phases: tuple[str, ...] = field(default=("run",), kw_only=True)

    def counted(self, phase: str) -> tuple[Entry, ...]:
        """Return the entries that add up in a phase: of roles that work in turn, the largest."""
        work: dict[str, int] = {}
        for entry in self.entries:
            if entry.is_work and entry.is_in(phase):
                work[entry.role] = work.get(entry.role, 0) + entry.num_bytes
        largest = max(work, key=lambda role: work[role], default=None)
        return tuple(
            entry
            for entry in self.entries
            if entry.is_in(phase) and (not entry.is_work or entry.role == largest)
        )

    def resident_bytes(self, phase: str) -> int:
        return sum(entry.num_bytes for entry in self.counted(phase))

    def peak_bytes(self) -> int:
        return max((self.resident_bytes(phase) for phase in self.phases), default=0)

    def host_bytes(self) -> int:
        """Return the bytes of host memory: it is reserved for the whole run."""
        return sum(entry.host_bytes for entry in self.entries)

    def beside_bytes(self, tag: str) -> int:
        """Return the most that other tags take in a phase where `tag` is resident, or 0."""
        phases = [
            phase
            for phase in self.phases
            if any(entry.tag == tag and entry.is_in(phase) for entry in self.entries)
        ]
        rest = self.sized(tag, 0)
        return max(map(rest.resident_bytes, phases), default=0)

    def sized(self, tag: str, num_bytes: int) -> Ledger:
        """Return a copy with `num_bytes` in each entry under `tag`."""
        entries = [
            replace(entry, num_bytes=num_bytes) if entry.tag == tag else entry
            for entry in self.entries
        ]
        return replace(self, entries=tuple(entries))

    def require(self, capacity_bytes: int) -> None:
        """Raises: PlanError with the arithmetic, if any phase needs more than `capacity_bytes`."""
        for phase in self.phases:
            needed = self.resident_bytes(phase)
            if needed > capacity_bytes:
                raise PlanError(
                    f"phase {phase} needs {self.sum_of(phase)}, and there are "
                    f"{as_size(capacity_bytes)}"
                )

    def sum_of(self, phase: str) -> str:
        """Return the sum of a phase as text."""
        counted = [entry for entry in self.counted(phase) if entry.num_bytes]
        terms = " + ".join(f"{entry.tag} {as_size(entry.num_bytes)}" for entry in counted)
        return f"{terms} = {as_size(self.resident_bytes(phase))}"

    def __add__(self, entries: Iterable[Entry]) -> Ledger:
        return replace(self, entries=(*self.entries, *entries))


def as_size(num_bytes: int) -> str:
    """Format bytes with four digits, at most three of them before the point unless in GiB."""
    number, unit = float(num_bytes), "B"
    for larger in UNITS:
        if number < THREE_DIGITS:
            break
        number, unit = number / 1024, larger
    if unit == "B" or number >= THREE_DIGITS:
        return f"{number:,.0f} {unit}"
    return f"{number:#.4g} {unit}"
