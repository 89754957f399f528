"""Residency of a region of memory: its states, the legal edges between them, and receipts. Pure.

    awake -> saving -> asleep -> loading -> awake      contents are copied to the host and back
    awake -> asleep -> awake                           contents are dropped

`saving` and `loading` are copies in the background: the memory is mapped, may be read while it is
saved, and must not be used while it is loaded. Where a step fails, the region goes back to the
state before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spmd_rl.errors import ResidencyError

State = Literal["awake", "saving", "asleep", "loading"]
EDGES: dict[State, tuple[State, ...]] = {
    "awake": ("saving", "asleep"),
    "saving": ("asleep", "awake"),
    "asleep": ("loading", "awake"),
    "loading": ("awake", "asleep"),
}


class Residency:
    """The state of one region. `tag` names it in errors."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.state: State = "awake"

    @property
    def is_mapped(self) -> bool:
        return self.state != "asleep"

    def require_awake(self, what: str) -> None:
        """Raise a ResidencyError unless the region is awake: `what` cannot be done."""
        if self.state != "awake":
            raise ResidencyError(f"memory '{self.tag}' is {self.state}: it cannot {what}")

    def move(self, to: State) -> None:
        """Take an edge. Raises: ResidencyError where there is none; the state stays."""
        if to not in EDGES[self.state]:
            raise ResidencyError(f"memory '{self.tag}' is {self.state}, so it cannot become {to}")
        self.state = to


@dataclass(frozen=True)
class Receipt:
    """What one sleep or wake did on one rank.

    Units: bytes and seconds. `before` and `after` are the mapped bytes of each region of the role.
    `copied_bytes` went to the host or came back, in `copy_s` of the copy engine, of which the call
    waited for `exposed_s`. `map_s` is the time of mapping or unmapping. `free_bytes` is the free
    memory of the GPU before and after, and `residue` what else is in use there afterwards, by
    class; both are empty on a CPU.
    """

    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    copied_bytes: int = 0
    map_s: float = 0.0
    copy_s: float = 0.0
    exposed_s: float = 0.0
    free_bytes: tuple[int, ...] = ()
    residue: dict[str, int] = field(default_factory=dict)
