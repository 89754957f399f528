"""The stacks that ranks sent: shown as one text, and saved beside the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spmd_rl.controller.channel.wire import Stacks
from spmd_rl.controller.lifecycle.stacks import all_stacks
from spmd_rl.observe.atomic_write import atomic_file, write_atomically

MUTE = "no answer: the process is stopped, gone, or holds the interpreter lock\n"


class Snapshots:
    """The newest stacks and flight record of each rank."""

    def __init__(self) -> None:
        self._stacks: dict[int, Stacks] = {}
        self._records: dict[int, bytes] = {}

    def take(self, rank: int, stacks: Stacks, record: bytes) -> None:
        """Keep what a rank sent."""
        self._stacks[rank], self._records[rank] = stacks, record

    def forget(self) -> None:
        """Start over: the processes have gone on since."""
        self._stacks.clear()
        self._records.clear()

    def has_all(self, ranks: Iterable[int]) -> bool:
        """Whether all of `ranks` have sent theirs."""
        return self._stacks.keys() >= set(ranks)

    def place(self, rank: int) -> str:
        """The line that a rank is at."""
        return f"at {self._stacks[rank].place}" if rank in self._stacks else "which does not answer"

    def has(self, rank: int) -> bool:
        """Whether a rank has sent its stacks."""
        return rank in self._stacks

    def text(self, title_by_rank: dict[int, str]) -> str:
        """Everybody's stacks, the controller's own last."""
        pages = [f"==== {title} ====\n{self._page(rank)}" for rank, title in title_by_rank.items()]
        return "\n".join([*pages, f"==== controller ====\n{all_stacks()}"])

    def save(self, folder: Path, world_size: int) -> str:
        """Write one file a rank, and the flight records beside them; says where, or why not."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(world_size):
                write_atomically(folder / f"rank_{rank}.txt", self._page(rank))
                if record := self._records.get(rank):
                    with atomic_file(folder / f"rank_{rank}.collectives.json") as file:
                        file.write(record)
            write_atomically(folder / "controller.txt", all_stacks())
        except OSError as error:  # a full disk must not hide why the run ends
            return f"the stacks could not be saved in {folder}: {error.strerror}"
        return f"the stacks of all ranks are in {folder}"

    def _page(self, rank: int) -> str:
        if rank not in self._stacks:
            return MUTE
        stacks = self._stacks[rank]
        refused = "".join(
            f"{count} frames refused: {reason}\n" for reason, count in stacks.refused.items()
        )
        return refused + stacks.text
