"""Snapshots of all ranks: their stacks and flight records, requested together, shown and saved."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from spmd_rl.controller.channel.messages import StackRequest, Stacks
from spmd_rl.controller.channel.router import Router
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.stacks import all_stacks
from spmd_rl.observe.atomic_write import atomic_file, write_atomically

GATHER_S = 2.0  # how long all ranks may take to send their stacks
NO_ANSWER = "no answer: the process is stopped, gone, or holds the interpreter lock\n"


class Snapshots:
    """The newest stacks and flight record of each rank.

    Whoever gathers them and reads the result holds `lock` meanwhile.
    """

    def __init__(self, roster: Roster) -> None:
        self.lock = threading.Lock()
        self._roster = roster
        self._stacks: dict[int, Stacks] = {}
        self._flight_records: dict[int, bytes] = {}

    def gather(self, router: Router) -> None:
        """Ask every present rank for its stacks.

        Blocks: until all have answered that are still present, `GATHER_S` at most.
        """
        asked = self._roster.present
        self._stacks.clear()
        self._flight_records.clear()
        router.post(asked, StackRequest())
        router.handle_until(lambda: self._has_all({*asked} & {*self._roster.present}), GATHER_S)

    def store(self, rank: int, stacks: Stacks, flight_record: bytes) -> None:
        """Store what a rank sent."""
        self._stacks[rank], self._flight_records[rank] = stacks, flight_record

    def has(self, rank: int) -> bool:
        """Return whether a rank has sent its stacks."""
        return rank in self._stacks

    def location(self, rank: int) -> str:
        """Return the line that a rank is at, as the end of a clause about it."""
        if rank not in self._stacks:
            return "which does not answer"
        return f"at {self._stacks[rank].location}"

    def text(self) -> str:
        """Return the stacks of all ranks and, last, of the controller."""
        pages = []
        for rank in range(self._roster.world_size):
            title = self._roster.workers.get(rank, f"rank {rank}")
            pages.append(f"==== {title} ====\n{self._page(rank)}")
        return "\n".join([*pages, f"==== controller ====\n{all_stacks()}"])

    def save(self, folder: Path) -> str:
        """Write a file for each rank, and the flight records; return where they are, or why not."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(self._roster.world_size):
                write_atomically(folder / f"rank_{rank}.txt", self._page(rank))
                if record := self._flight_records.get(rank):
                    with atomic_file(folder / f"rank_{rank}.collectives.json") as file:
                        file.write(record)
            write_atomically(folder / "controller.txt", all_stacks())
        except OSError as error:  # a full disk must not hide why the run ends
            return f"the stacks could not be saved in {folder}: {error.strerror}"
        return f"the stacks of all ranks are in {folder}"

    def _has_all(self, ranks: Iterable[int]) -> bool:
        return self._stacks.keys() >= set(ranks)

    def _page(self, rank: int) -> str:
        if rank not in self._stacks:
            return NO_ANSWER
        stacks = self._stacks[rank]
        counts = stacks.refused.items()
        refused = "".join(f"{count} frames refused: {reason}\n" for reason, count in counts)
        return refused + stacks.text
